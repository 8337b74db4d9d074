"""The console's keys, roles, sessions and limit on guesses."""

from dataclasses import replace

import pytest

from glowplug.domain.access import KEYS, ApiKey, Role, Surface, digest_of
from glowplug.domain.errors import NoCapacity, RoleRequired
from glowplug.events.envelope import to_json
from glowplug.runtime.key_reader import FRESH_S, KEPT_S, KeyReader
from glowplug.services.console import login
from glowplug.services.console.login import ConsoleAccess, TooManyWrongKeys, WrongKey
from glowplug.state.memory_store import MemoryStore
from glowplug.state.port import StoreUnavailable

ONE_CLIENT, ANOTHER = "10.0.0.1", "10.0.0.2"


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def made(clock: Clock) -> ConsoleAccess:
    return ConsoleAccess("the key", 3600.0, clock)


async def log_in(made: ConsoleAccess, key: str) -> str:
    return made.log_in(await made.who(key, ONE_CLIENT))


async def is_open(made: ConsoleAccess, token: str) -> bool:
    return await made.session(token) is not None


async def guess(made: ConsoleAccess, address: str = ONE_CLIENT, key: str = "wrong") -> type[Exception] | None:
    try:
        await made.who(key, address)
    except (WrongKey, TooManyWrongKeys) as error:
        return type(error)
    return None


async def test_a_session_lasts_its_time_or_until_the_logout(made: ConsoleAccess, clock: Clock) -> None:
    first, second = await log_in(made, "the key"), await log_in(made, "the key")
    assert first != second and len(first) >= 43
    clock.now_s += 3599
    assert await is_open(made, first) and await is_open(made, second)
    made.log_out(first)
    assert not await is_open(made, first) and await is_open(made, second)
    clock.now_s += 1
    assert not await is_open(made, second)
    assert not await is_open(made, "") and not await is_open(made, "\ud800")


@pytest.mark.parametrize("key", ["", "the kex", "the key ", "\ud800", "é"])
async def test_another_key_opens_nothing(made: ConsoleAccess, key: str) -> None:
    with pytest.raises(WrongKey):
        await log_in(made, key)


async def test_wrong_keys_are_bounded_by_address_and_time(made: ConsoleAccess, clock: Clock) -> None:
    assert [await guess(made) for _ in range(login.MAX_WRONG)] == [WrongKey] * login.MAX_WRONG
    assert await guess(made) is TooManyWrongKeys
    assert await guess(made, key="the key") is TooManyWrongKeys, (
        "else a right guess could still be distinguished from a wrong one"
    )
    assert await guess(made, ANOTHER, "the key") is None, "others still log in"
    clock.now_s += login.WINDOW_S
    assert await guess(made, key="the key") is None


async def test_right_keys_are_not_counted(made: ConsoleAccess) -> None:
    assert {await guess(made, key="the key") for _ in range(100)} == {None}


async def test_many_addresses_guess_no_more_than_so_often(made: ConsoleAccess) -> None:
    tried = [await guess(made, f"10.0.{k // 256}.{k % 256}") for k in range(2 * login.MAX_WRONG_IN_ALL)]
    assert tried.count(WrongKey) == login.MAX_WRONG_IN_ALL


async def test_the_addresses_of_one_ipv6_network_are_one(made: ConsoleAccess) -> None:
    tried = [await guess(made, f"2001:db8::{k:x}") for k in range(20)]
    assert tried.count(WrongKey) == login.MAX_WRONG
    assert await guess(made, "2001:db8:0:1::1") is WrongKey


async def test_sessions_are_bounded_and_the_oldest_leaves(made: ConsoleAccess) -> None:
    first = await log_in(made, "the key")
    tokens = [await log_in(made, "the key") for _ in range(login.MAX_SESSIONS)]
    assert not await is_open(made, first) and all([await is_open(made, token) for token in tokens])


class Away(MemoryStore):
    is_away = False

    async def get(self, table: str, key: str) -> bytes | None:
        if self.is_away:
            raise StoreUnavailable("away")
        return await super().get(table, key)


WHOLE = "gp-abcdefgh-" + "s" * 43
ROW = ApiKey(key_id="abcdefgh", tenant="lab", name="bot", sha256=digest_of(WHOLE), surfaces=(Surface.READ,))


@pytest.fixture
def store() -> Away:
    return Away()


@pytest.fixture
async def keyed(store: Away, clock: Clock) -> ConsoleAccess:
    await store.put(KEYS, ROW.key_id, to_json(ROW))
    return ConsoleAccess("the key", 3600.0, clock, admin_token="the token", keys=KeyReader(store, clock))


@pytest.mark.parametrize(
    ("surface", "role"),
    [(Surface.READ, Role.VIEWER), (Surface.OPERATE, Role.OPERATOR), (Surface.ADMIN, Role.ADMIN)],
)
async def test_a_named_key_gives_the_role_of_its_surface(
    keyed: ConsoleAccess, store: Away, surface: Surface, role: Role
) -> None:
    await store.put(KEYS, ROW.key_id, to_json(replace(ROW, surfaces=(Surface.DATA, surface))))
    who = await keyed.who(WHOLE, ONE_CLIENT)
    assert (who.name, who.role) == ("key gp-abcdefgh (lab/bot)", role)
    with pytest.raises(WrongKey):
        await keyed.who(WHOLE[:-1] + "t", ONE_CLIENT)


async def test_a_key_of_the_data_port_has_no_role(keyed: ConsoleAccess, store: Away) -> None:
    await store.put(KEYS, ROW.key_id, to_json(replace(ROW, surfaces=(Surface.DATA,))))
    with pytest.raises(RoleRequired):
        await keyed.who(WHOLE, ONE_CLIENT)


async def test_the_consoles_key_reads_where_it_has_the_admin_token(keyed: ConsoleAccess, made: ConsoleAccess) -> None:
    assert (await keyed.who("the key", ONE_CLIENT)).role is Role.VIEWER
    assert (await keyed.who("the token", ONE_CLIENT)).role is Role.ADMIN
    assert (await made.who("the key", ONE_CLIENT)).role is Role.ADMIN, "the services ask for the token themselves"


@pytest.mark.parametrize("change", [{"revoked_at": 1.0}, {"expires_at": 1.0}, {"surfaces": (Surface.DATA,)}, None])
async def test_a_session_ends_with_the_key_that_opened_it(
    keyed: ConsoleAccess, store: Away, clock: Clock, change: dict | None
) -> None:
    token = await log_in(keyed, WHOLE)
    assert await is_open(keyed, token)
    if change is None:
        await store.delete(KEYS, ROW.key_id)
    else:
        await store.put(KEYS, ROW.key_id, to_json(replace(ROW, **change)))
    clock.now_s += FRESH_S
    assert not await is_open(keyed, token)


async def test_a_key_is_known_for_a_while_without_the_store(keyed: ConsoleAccess, store: Away, clock: Clock) -> None:
    token = await log_in(keyed, WHOLE)
    store.is_away = True
    clock.now_s += KEPT_S - 1
    assert await is_open(keyed, token)
    clock.now_s += 1
    with pytest.raises(NoCapacity):
        await keyed.session(token)
    assert (await keyed.who("the token", ONE_CLIENT)).role is Role.ADMIN
