"""Put on the path of a run's processes to break one of its ranks: BREAK is `rank:when:how`.

When is an order's name (Train, Sample, Build), how is `raise`, `kill` or `hang`. Rank 0 is broken in its own part.
"""

import os

rank, when, how = os.environ.get("BREAK", "::").split(":")

if rank and os.environ.get("RANK") == rank:
    import signal

    import retrain.distributed.worker as worker

    def broken(order: object) -> None:
        if type(order).__name__ == when and getattr(order, "step", 1) >= 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("broken on purpose")

    if rank != "0":
        obey = worker.Worker.obey

        def obey_or_break(self: worker.Worker, order: object) -> object:
            broken(order)
            return obey(self, order)

        worker.Worker.obey = obey_or_break
    else:
        from retrain.distributed.learner import RankedLearner
        from retrain.distributed.orders import Train

        take_step = RankedLearner.take_step

        def take_step_or_break(self, datums, size, step):
            broken(Train(datums, size, step))
            return take_step(self, datums, size, step)

        RankedLearner.take_step = take_step_or_break
