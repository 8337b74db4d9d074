"""Write the bill of materials of an image: CycloneDX 1.6 JSON of every Python distribution and Debian package in it.

python sbom.py NAME VERSION [--site DIR] [--dpkg FILE] > sbom.cdx.json
"""

import argparse
import json
import re
import sys
import sysconfig
from importlib.metadata import Distribution, PackageMetadata, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

LICENSE_LIMIT = 120  # longer ones are whole licence texts in the wrong field


def python_components(site: str) -> list[dict[str, Any]]:
    """One component per installed distribution."""
    return [_python(found) for found in distributions(path=[site])]


def _python(found: Distribution) -> dict[str, Any]:
    name = re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower()
    component: dict[str, Any] = {
        "type": "library",
        "name": name,
        "version": found.version,
        "purl": f"pkg:pypi/{name}@{found.version}",
    }
    if licence := _licence(found.metadata):
        component["licenses"] = [licence]
    return component


def _licence(metadata: PackageMetadata) -> dict[str, Any] | None:
    if "License-Expression" in metadata:
        return {"expression": metadata["License-Expression"]}
    named = [line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier", []) if line.startswith("License ::")]
    name = named[0] if named else (metadata.get_all("License") or [""])[0]
    return {"license": {"name": name}} if name and len(name) < LICENSE_LIMIT and "\n" not in name else None


def debian_components(status: Path) -> list[dict[str, Any]]:
    """One component per package of a dpkg status file; none without the file."""
    components = []
    for stanza in status.read_text().split("\n\n") if status.exists() else ():
        fields = dict(re.findall(r"^(Package|Version|Architecture): (.*)$", stanza, re.MULTILINE))
        if {"Package", "Version"} <= fields.keys():
            name, version = fields["Package"], fields["Version"]
            where = f"?arch={fields['Architecture']}" if "Architecture" in fields else ""
            purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}{where}"
            components.append({"type": "library", "name": name, "version": version, "purl": purl})
    return components


def document(name: str, version: str, components: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole bill, components in a fixed order. Without time and serial number, so that equal images give equal
    bills."""
    ordered = sorted(components, key=lambda c: str(c["purl"]))
    root = {
        "type": "container",
        "bom-ref": f"glowplug/{name}@{version}",
        "name": f"glowplug/{name}",
        "version": version,
    }
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": root},
        "components": [{"bom-ref": component["purl"], **component} for component in ordered],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("version")
    parser.add_argument("--site", default=sysconfig.get_path("purelib"))
    parser.add_argument("--dpkg", type=Path, default=Path("/var/lib/dpkg/status"))
    told = parser.parse_args()
    components = python_components(told.site) + debian_components(told.dpkg)
    json.dump(document(told.name, told.version, components), sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
