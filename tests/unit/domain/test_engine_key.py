"""Keys of engines: one for each, the same for whoever shares the secret, none without it."""

from glowplug.domain.engine_key import engine_key


def test_a_key_needs_both_and_differs_by_both() -> None:
    key = engine_key("secret", "1")
    assert len(key) >= 40 and key == engine_key("secret", "1")
    assert len({key, engine_key("secret", "2"), engine_key("other", "1")}) == 3
    assert engine_key("", "1") == engine_key("secret", "") == ""
    assert "secret" not in key
