#!/usr/bin/env bash
# Build the wheel and use it as a stranger would: in a clean environment, outside the checkout.
# An editable install finds every file of the checkout; only this notices one that the wheel lacks. The environment
# links to the packages that the wheel depends on, no others: to install torch once more takes minutes.
#
# usage: scripts/wheel_check.sh PYTHON, having nerfturbo's dependencies and its extra `dev`
set -euo pipefail

python=$(realpath --no-symlinks "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
checkout=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH VIRTUAL_ENV
export PYTHONNOUSERSITE=1

say() { printf 'wheel check, %3d s: %s\n' "$SECONDS" "$*"; }

say "building source distribution and wheel"
"$python" -m build --no-isolation --outdir "$work/dist" . >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
wheel=$(echo "$work"/dist/nerfturbo-*.whl)

"$python" - "$wheel" <<'PYTHON'
import pathlib, sys, zipfile

have = set(zipfile.ZipFile(sys.argv[1]).namelist())
files = (path for path in pathlib.Path("nerfturbo").rglob("*") if path.is_file())
missing = sorted(path.as_posix() for path in files if "__pycache__" not in path.parts and path.as_posix() not in have)
if missing:
    sys.exit("the wheel lacks these files (see [tool.setuptools.package-data]):\n  " + "\n  ".join(missing))
PYTHON

# Whoever packages nerfturbo starts from the source distribution: all of the checkout but what serves git.
if missing=$(git ls-files -- ':!:.git*ignore' ':!:.gitattributes' 2>/dev/null | sort) && [ -n "$missing" ]; then
  tar tzf "$work"/dist/nerfturbo-*.tar.gz | sed 's#^[^/]*/##' | sort >"$work/sdist.txt"
  missing=$(comm -23 <(echo "$missing") "$work/sdist.txt")
  [ -z "$missing" ] || { echo "the source distribution lacks these files (see MANIFEST.in):"; echo "$missing"; exit 1; }
fi

say "installing $(basename "$wheel") into a clean environment"
"$python" -m venv --without-pip "$work/venv"
"$python" scripts/borrow.py "$wheel" "$("$work/venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')"
"$python" -m pip --python "$work/venv/bin/python" install -qq --no-index --no-compile --disable-pip-version-check "$wheel"

cd "$work"
case $("$work/venv/bin/python" -c 'import nerfturbo; print(nerfturbo.__file__)') in
  "$work"/venv/*) ;;
  *) echo "import nerfturbo does not come from the clean environment"; exit 1 ;;
esac
case $PWD in "$checkout"*) echo "the check ran inside the checkout: set TMPDIR to a folder outside it"; exit 1 ;; esac

say "nerfturbo doctor"
"$work/venv/bin/nerfturbo" doctor >"$work/doctor.log" 2>&1 || { cat "$work/doctor.log"; exit 1; }

say "nerfturbo train --steps 50"
"$work/venv/bin/nerfturbo" train --steps 50 --output "$work/run" >"$work/train.log" 2>&1 || { cat "$work/train.log"; exit 1; }
for file in metrics.json report.html; do
  test -s "$work/run/$file" || { cat "$work/train.log"; echo "the run folder has no $file"; exit 1; }
done
say "passed"
