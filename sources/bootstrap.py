# Finds the course, so that `from utils import ...` works below. In Colab it clones `repository`, where one is set.
import importlib.util
import pathlib
import subprocess
import sys

def open_course(repository=""):
    here, colab = pathlib.Path.cwd(), "google.colab" in sys.modules
    clone = here / (repository.rsplit("/", 1)[-1] or "big-models-small-memory")
    if colab and repository and not clone.is_dir():
        subprocess.run(["git", "clone", "--quiet", "--depth=1", repository, str(clone)])
    marks = ("pyproject.toml", "utils/units.py")
    found = [p for p in (here, *here.parents, clone) if all((p / m).is_file() for m in marks)]
    if not found:
        get = f"git clone {repository}" if repository else "clone or download it"
        raise RuntimeError(f"The course was not found above {here}. Open this notebook inside a copy "
                           f"of the repository: {get}, then make lab.")
    if sys.version_info < (3, 11) or not all(map(importlib.util.find_spec, ("torch", "numpy"))):
        raise RuntimeError(f"This kernel ({sys.executable}) lacks what the course needs. Choose the "
                           "kernel of the course's .venv, or close this and start with: make lab")
    sys.path.insert(0, str(found[0]))
    if colab:
        importlib.import_module("utils.colab").prepare(found[0])

open_course()
