"""An installed distribution, as pip leaves it: metadata with entry points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(site: Path, package: str, names: Mapping[str, Mapping[str, str]]) -> None:
    """Write the metadata of `package` to the folder `site`. `names`: kind -> name -> module:attribute."""
    metadata = site / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = []
    for kind, places in names.items():
        lines += [f"[rollover.{kind}]", *(f"{name} = {place}" for name, place in places.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
