"""A stand-in for CUDA graphs: what is recorded is run again at each replay, both are counted."""

from collections.abc import Callable


class RunRecorder:
    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            run()

        return replay

    def counts(self) -> tuple[int, int]:
        """Recorded and replayed since the last call."""
        counts = self.num_recorded, self.num_replayed
        self.num_recorded = self.num_replayed = 0
        return counts
