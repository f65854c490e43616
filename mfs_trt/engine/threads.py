"""How many threads a CPU engine uses and how they wait.

OpenMP threads that spin between parallel regions starve every neighbour on the same cores (the
server, its stub, a client) and then themselves; passive waiting costs an idle machine little.
Figures: `perf/results/threads_reference.json`, `threads_openvino.json`.
"""

import os

PASSIVE_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}


def choose_num_threads() -> int:
    """Cores that this process may run on, or `OMP_NUM_THREADS` where the operator set it."""
    return int(os.environ.get("OMP_NUM_THREADS", 0)) or len(os.sched_getaffinity(0))


def wait_passively() -> None:
    """Ask OpenMP for passive waiting; it listens only before its library is first loaded."""
    for name, value in PASSIVE_WAITING.items():
        os.environ.setdefault(name, value)
