"""What ranks of one machine open, where no other machine reaches it; no torch until it is asked for."""

from __future__ import annotations

import os
import random
import socket
from typing import TYPE_CHECKING

# `TCPStore` is documented as PyTorch's, though the package does not list it as exported.
if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

LOCALHOST = "127.0.0.1"
# Below what Linux (from 32768), Windows and macOS (from 49152) give to sockets that ask for any port.
# There another process can take a port before its program listens, and a client that calls too early
# can be given that very port for its own end, which connects it to itself.
LOWEST_PORT, HIGHEST_PORT, TRIES = 20_000, 32_000, 100


def local_store(address: str = LOCALHOST, port: int = 0) -> TCPStore:
    """A store on one address, by default one that only this machine reaches; the system chooses the port.

    Left to itself, PyTorch's store listens on every address, and asks nobody who they are. Nor does
    this one ask: another user of this machine can write into it.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    listening = socket.create_server((address, port))
    port = listening.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def loopback_port() -> int:
    """A port of this machine for a program that takes a number, in place of an open socket.

    Nothing listens there, and no system gives it away by itself. The choice does not follow
    `random.seed`: two programs with one seed would meet at one port.

    Raises:
        OSError: all of a hundred ports were taken.
    """
    for port in random.SystemRandom().sample(range(LOWEST_PORT, HIGHEST_PORT), TRIES):
        with socket.socket() as tried:
            try:
                tried.bind((LOCALHOST, port))
            except OSError:
                continue
            return port
    raise OSError(
        f"{TRIES} ports from {LOWEST_PORT} to {HIGHEST_PORT} of {LOCALHOST} are taken; `ss -ltn` shows by what."
    )


def loopback_variables() -> dict[str, str]:
    """What keeps the connections between ranks inside this machine.

    Else gloo also looks up the machine's name, which fails or takes seconds on some networks.
    """
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {f"{library}_SOCKET_IFNAME": name for name in names for library in ("GLOO", "NCCL")}


def launched_store() -> TCPStore | None:
    """Where torchrun's ranks of one machine meet, for `init_process_group`; None for any other launch.

    That is one whose ranks were told to meet at the loopback address, in a store that rank 0 is to
    open (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1): opened here, it lies on that address alone, and so
    do the ranks' own connections.
    """
    told, has_agents_store = os.environ, os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if told.get("MASTER_ADDR") != LOCALHOST or has_agents_store or "RANK" not in told:
        return None
    os.environ |= loopback_variables()
    port = int(told["MASTER_PORT"])
    if told["RANK"] == "0":
        return local_store(LOCALHOST, port)
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore(LOCALHOST, port, is_master=False)
