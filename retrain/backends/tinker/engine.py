"""Sampling on the service: one request per prompt, all in flight at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

import numpy as np
import tinker
from tinker import types

from retrain.backends.tinker.service import Service
from retrain.backends.tinker.throttle import Throttle
from retrain.errors import RolloutError
from retrain.inference_engine import Progress, Turn, Turns
from retrain.modeling.tokens import Tokenizer
from retrain.runtime.clock import awake_s
from retrain.seeding import derive_seed
from retrain.types import Completion, IntArray, Sampling

# Some services store seeds as signed 32-bit integers.
MAX_SEED = 1 << 31


class TinkerEngine:
    """An InferenceEngine with a sampling client, which the backend replaces after each step."""

    def __init__(
        self, service: Service, throttle: Throttle, tokenizer: Tokenizer, stop_ids: Sequence[int], progress: Progress
    ) -> None:
        self.service = service
        self.throttle = throttle
        self.tokenizer = tokenizer
        self.stop_ids = list(stop_ids)
        self.progress = progress
        self.client: tinker.SamplingClient | None = None

    def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
        """Sample completions for all prompts at once."""
        with self.throttle.slot():
            futures = [
                self._submit(prompt, sampling, self._seed(sampling.seed, index, prompt))
                for index, prompt in enumerate(prompts)
            ]
            try:
                self._watch(futures)
                return [self._completions(future.result()) for future in futures]
            finally:
                for future in futures:
                    future.cancel()

    def serve(self, turns: Turns) -> None:
        """Submit each turn as it arrives, and complete it as soon as the service has."""
        requests: list[Future[types.SampleResponse]] = []
        over = threading.Event()
        with self.throttle.slot():
            threading.Thread(target=self._cancel_on_timeout, args=(requests, over), daemon=True).start()
            try:
                while batch := turns.take(wait=True):
                    for turn in batch:
                        future = self._submit(turn.prompt_ids, turn.sampling, turn.sampling.seed)
                        requests.append(future)
                        future.add_done_callback(self._complete_turn(turn))
            finally:
                over.set()
                for future in requests:
                    future.cancel()

    def sync(self, weights: object) -> None:
        """Set the weights to sample from: a sampling client of the service."""
        assert isinstance(weights, tinker.SamplingClient)
        self.client = weights

    def shutdown(self) -> None:
        """Does nothing: all state is on the service."""

    def _seed(self, seed: int, index: int, prompt: IntArray) -> int:
        """A seed per prompt, so that equal prompts get different completions."""
        return derive_seed(seed, f"tinker/{index}")

    def _submit(self, prompt: IntArray, sampling: Sampling, seed: int) -> Future[types.SampleResponse]:
        assert self.client is not None, "Backend.sampler comes first"
        parameters = types.SamplingParams(
            max_tokens=sampling.max_tokens,
            seed=seed % MAX_SEED,
            stop=self.stop_ids or None,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
        )
        request: Future[types.SampleResponse]
        request = self.client.sample(types.ModelInput.from_ints(prompt.tolist()), sampling.n, parameters)
        return request

    def _watch(self, futures: Sequence[Future[types.SampleResponse]]) -> None:
        """Wait for all futures, or for the first that fails."""
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=self.service.health_check_s, return_when=FIRST_COMPLETED)
            for future in done or list(pending)[:1]:
                # If none is done, waiting for one checks that the service still responds.
                self.service.wait(future, "sampling")
            self.progress("sampling", len(futures) - len(pending), len(futures))

    def _cancel_on_timeout(self, requests: list[Future[types.SampleResponse]], over: threading.Event) -> None:
        """Cancel all requests if the service stops responding, so that nothing waits forever."""
        last_seen = awake_s()
        while not over.wait(self.service.health_check_s):
            if self.service.answers():
                last_seen = awake_s()
            elif awake_s() - last_seen > self.service.patience_s:
                for future in tuple(requests):
                    future.cancel()

    def _complete_turn(self, turn: Turn) -> Callable[[Future[types.SampleResponse]], None]:
        def complete(future: Future[types.SampleResponse]) -> None:
            if turn.answer.done():
                return
            if future.cancelled():
                gone = f"the Tinker service at {self.service.url} stopped answering, or the run was stopped."
                turn.answer.set_exception(RolloutError(f"the turn was abandoned: {gone}"))
                return
            try:
                turn.answer.set_result(self._completions(self.service.wait(future, "sampling"))[0])
            except Exception as error:
                turn.answer.set_exception(error)

        return complete

    def _completions(self, response: types.SampleResponse) -> list[Completion]:
        return [self._completion(sequence) for sequence in response.sequences]

    def _completion(self, sequence: types.SampledSequence) -> Completion:
        if sequence.logprobs_np is None and len(sequence.tokens):
            raise RolloutError(
                "the Tinker service returned a completion without log-probs, so it cannot be trained on."
            )
        tokens = np.asarray(sequence.tokens, dtype=np.int64)
        return Completion(
            token_ids_T=tokens,
            logprobs_T=np.asarray(sequence.logprobs if len(tokens) else [], dtype=np.float32),
            text=self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True),
            finish_reason=sequence.stop_reason,
        )


class FrozenTinkerEngine(TinkerEngine):
    """Seeds depend on the prompt alone, so that its completion does not depend on its position in a batch."""

    def _seed(self, seed: int, index: int, prompt: IntArray) -> int:
        return derive_seed(seed, prompt.tobytes().hex())
