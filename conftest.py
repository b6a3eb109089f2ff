"""For notebooks that are tested side by side."""

from __future__ import annotations

import os

from jupyter_client.manager import KernelManager

# Ports are chosen before a kernel binds them, so that two that start at once can meet in one.
# Files have names of their own.
if os.name == "posix":
    KernelManager.transport.default_value = "ipc"
