"""A worker of vLLM in which a test can take out a remedy, to see that it is needed. Runs in vLLM's interpreter."""

from rollover.engine.vllm_worker import WorkerExtension


class Faults(WorkerExtension):
    def leave_out(self, remedy: str) -> str:
        """This method of the weight backend does nothing, until `put_back`."""
        setattr(self.weight_transfer_engine, remedy, lambda *_: None)
        return remedy

    def put_back(self, remedy: str) -> str:
        delattr(self.weight_transfer_engine, remedy)
        return remedy
