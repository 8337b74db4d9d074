"""Every overlay renders, alike with every kustomize, into what two versions of Kubernetes take."""

import jsonschema
import kubernetes_validate
import pytest

from tests.k8s.crds import SCHEMAS
from tests.k8s.rendering import K8S, TARGETS, render, rendered_text, renderers, title

VERSIONS = ("1.30.0", "1.36.0")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_manifest_is_valid(target: str, version: str) -> None:
    manifests = render(target)
    assert manifests
    for manifest in manifests:
        if (schema := SCHEMAS.get((manifest["apiVersion"], manifest["kind"]))) is not None:
            jsonschema.validate(manifest, schema)
        else:
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_unknown_field_is_found(version: str) -> None:
    manifest = render("sim")[-1]
    manifest["spec"]["colour"] = "red"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("target", TARGETS)
def test_every_kustomize_renders_the_same(target: str) -> None:
    texts = {name: rendered_text(target, name) for name in renderers()}
    if len(texts) < 2:
        pytest.skip("only one kustomize here to render with")
    first = next(iter(texts.values()))
    assert {name for name, text in texts.items() if text != first} == set()


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_rendered_twice(target: str) -> None:
    titles = [title(manifest) for manifest in render(target)]
    assert sorted(titles) == sorted(set(titles))


def test_every_manifest_file_belongs_to_an_overlay() -> None:
    """A file that no kustomization names is never applied."""
    for kustomization in K8S.rglob("kustomization.yaml"):
        told = kustomization.read_text()
        beside = {f.name for f in kustomization.parent.iterdir() if f.is_file()} - {"kustomization.yaml"}
        assert {name for name in beside if name not in told} == set(), kustomization
