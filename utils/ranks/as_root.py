"""The child of `run_hosts` where nobody is root: it is root in a user namespace of its own.

`unshare --user --map-root-user python -m utils.ranks.as_root CALL` reads a call from the file CALL
and writes what came of it beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle

from utils.ranks.hosts import in_namespaces
from utils.ranks.namespaces import NamespaceError

REFUSED = 3  # exit code where no hosts could be made


def answer(call: Path) -> int:
    """Run the call; the exit code."""
    try:
        found = in_namespaces(cloudpickle.loads(call.read_bytes()))
    except NamespaceError:
        return REFUSED
    except Exception as error:  # for whoever asked, in its own process  # noqa: BLE001
        found = error
    call.with_name("answer").write_bytes(cloudpickle.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(answer(Path(sys.argv[1])))
