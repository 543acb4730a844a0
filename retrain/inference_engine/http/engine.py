"""An InferenceEngine over servers: samples there, and verifies here that the right policy was used.

Returned log-probs are those of the sampled distribution. Where a server reports others, the trainer recomputes them
with the weights that the server has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

import numpy as np
import torch

from retrain.config.schema import Inference
from retrain.errors import ConfigError, RolloutError
from retrain.inference_engine import Deliver, Progress, Turn, Turns
from retrain.inference_engine.http.adapters import AdapterFolder
from retrain.inference_engine.http.client import Client, gather_all
from retrain.inference_engine.http.fleet import Fleet, Server
from retrain.inference_engine.http.proof import PolicyScorer, Row, State, Surplus, Verdict, identify_weights
from retrain.inference_engine.http.spec import Adapter, CompletionRequest, ServerSpec
from retrain.inference_engine.http.startup import Startup, Survey
from retrain.modeling.policy import Policy
from retrain.modeling.tokens import Tokenizer
from retrain.seeding import derive_seed
from retrain.types import Completion, IntArray, Sampling, StepMetrics

# Completions rescored per server and call, more where they are short; and the largest mean mismatch between server
# and trainer: this much, or this multiple of the mismatch at the start.
PROOF_ROWS, PROOF_TOKENS = 4, 512
MIN_LIMIT, START_FACTOR = 0.05, 10.0

ServedRow = tuple[Server, Row]


class HttpEngine:
    """Samples on one or more servers of the same kind."""

    def __init__(
        self, spec: ServerSpec, policy: Policy, inference: Inference, tokenizer: Tokenizer, progress: Progress
    ) -> None:
        self.spec, self.policy, self.tokenizer, self.progress = spec, policy, tokenizer, progress
        urls = spec.urls(inference.url)
        self.client = Client(inference.timeout_s)
        self.fleet = Fleet(spec, urls, self.client, inference.wait_s, progress)
        self.fleet.vocabulary = policy.vocabulary
        self.folder = AdapterFolder(inference.adapter_dir, spec.mlx_adapters)
        self.scorer = PolicyScorer(policy)
        self.adapter: Adapter | None = None
        self.newest: State = {}
        self.previous: State = {}
        self.survey = Survey(context=policy.context_length)
        self.verdicts: list[Verdict] = []
        self.surplus: dict[tuple[str, Sampling], Surplus] = {}
        """Statistics of each server's samples, by requested distribution."""

    def check(self, sampling: Sampling, log: Callable[[str], None]) -> int:
        """Before training, raise for servers that are down, serve another model or lack a capability."""
        self.spec.check_sampling(sampling)
        startup = Startup(self.spec, self.fleet, self.tokenizer, self.scorer, self.prompt_text)
        self.survey = startup.survey(sampling, log)
        startup.check_adapters(self.sync)
        self.fleet.log = log
        return self.survey.context

    def sync(self, weights: object) -> None:
        """Send the adapter to the servers, unless they have it."""
        state = self.scorer.snapshot()
        if self.adapter and all(torch.equal(state[name], tensor) for name, tensor in self.newest.items()):
            return
        fresh, old = self.folder.write(self.policy), self.adapter
        self.client.run(self.fleet.deliver(fresh))
        self.adapter = fresh
        self.previous, self.newest = self.newest, state
        if old:
            self.folder.delete(old)

    def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
        """Sample completions: all requests at once, distributed over the servers."""
        self.spec.check_sampling(sampling)
        requests = [request for at, prompt in enumerate(prompts) for request in self._requests(prompt, sampling, at)]
        drawn = self.client.run(self._draw(requests, self._counter(len(prompts) * sampling.n)))
        self._prove(drawn, sampling)
        rows = self._with_sampled_logprobs([row for _, row in drawn], sampling)
        completions = self._completions(rows)
        return [completions[at : at + sampling.n] for at in range(0, len(completions), sampling.n)]

    def generate_each(
        self, prompts: Sequence[IntArray], sampling: Sampling, deliver: Deliver
    ) -> list[list[Completion]]:
        """The same, with the completions of each prompt delivered as they arrive; the servers are verified at the end.

        What is delivered must therefore not be final before this returns.
        """
        self.spec.check_sampling(sampling)
        requests_P = [self._requests(prompt, sampling, at) for at, prompt in enumerate(prompts)]
        arrived: SimpleQueue[tuple[int, list[ServedRow]] | None] = SimpleQueue()
        count = self._counter(len(prompts) * sampling.n)

        async def draw(at: int) -> list[ServedRow]:
            rows = await self._draw(requests_P[at], count)
            arrived.put((at, rows))
            return rows

        async def draw_all() -> list[ServedRow]:
            return [row for rows in await gather_all([draw(at) for at in range(len(prompts))]) for row in rows]

        future = self.client.submit(draw_all())
        future.add_done_callback(lambda _: arrived.put(None))
        completions_P: list[list[Completion]] = [[] for _ in prompts]
        try:
            while (found := arrived.get()) is not None:
                at, drawn = found
                completions_P[at] = self._completions(self._with_sampled_logprobs([row for _, row in drawn], sampling))
                deliver(at, completions_P[at])
            self._prove(future.result(), sampling)
        except BaseException:
            future.cancel()
            raise
        return completions_P

    def serve(self, turns: Turns) -> None:
        """Sample turns as they arrive, concurrently; a failed turn gets the exception."""
        drawn: list[tuple[ServedRow, Sampling]] = []
        futures: list[Future[Completion]] = []
        requests: list[Future[ServedRow]] = []
        # One thread: rescoring uses one model.
        with ThreadPoolExecutor(1, "retrain-turns") as after:

            def finish(turn: Turn, begun: Future[ServedRow]) -> None:
                try:
                    drawn.append((begun.result(), turn.sampling))
                    rows = self._with_sampled_logprobs([begun.result()[1]], turn.sampling)
                    completion = self._completions(rows)[0]
                except Exception as error:
                    turn.answer.set_exception(error)
                else:
                    turn.answer.set_result(completion)

            def pass_on(turn: Turn, begun: Future[ServedRow]) -> None:
                # After an error, replies may still arrive.
                with suppress(RuntimeError):
                    after.submit(finish, turn, begun)

            try:
                while taken := turns.take(wait=True):
                    for turn in taken:
                        futures.append(turn.answer)
                        requests.append(self.client.submit(self._one(turn)))
                        requests[-1].add_done_callback(partial(pass_on, turn))
                wait(futures)
            except BaseException:
                for request in requests:
                    request.cancel()
                raise
        for failed in (future.exception() for future in futures):
            if failed:
                raise failed
        if drawn:
            self._prove([one for one, _ in drawn], drawn[0][1])

    def metrics(self) -> StepMetrics:
        """How well the servers' log-probs fit the newest policy, since the last call."""
        verdicts, self.verdicts = self.verdicts, []
        proofs = [verdict.proof for verdict in verdicts if verdict.proof is not None]
        if not verdicts:
            return {"policy_proof": None, "mismatch_mean": None, "mismatch_max": None, "mismatch_kl": None}
        return {
            "policy_proof": min(proofs) if proofs else None,
            "mismatch_mean": sum(verdict.mismatch_mean for verdict in verdicts) / len(verdicts),
            "mismatch_max": max(verdict.mismatch_max for verdict in verdicts),
            "mismatch_kl": sum(verdict.mismatch_kl for verdict in verdicts) / len(verdicts),
        }

    @property
    def mismatch_at_start(self) -> float:
        """Mean difference from the trainer's log-probs under the base model."""
        return self.survey.mismatch

    def shutdown(self) -> None:
        """Remove our adapters from the servers and the disk."""
        if self.client.is_closed:
            return
        try:
            self.client.run(self.fleet.unload_all())
        except RolloutError:
            # The run is over; a broken server may keep its adapter.
            pass
        finally:
            self.client.close()
            self.folder.close()

    def prompt_text(self, prompt_ids: IntArray) -> str:
        """The prompt as text, for servers that take text only; raises if it does not tokenize to the same ids."""
        if self.spec.takes_ids:
            return ""
        ids = prompt_ids.tolist()
        # If the server's tokenizer adds a first token, the text is sent without it.
        for kept in (ids, ids[1:]):
            text = str(self.tokenizer.decode(kept, skip_special_tokens=False))
            if list(self.tokenizer(text)["input_ids"]) == ids:
                return text
        raise ConfigError(
            f'[inference] engine = "{self.spec.name}" takes text, and this tokenizer does not turn a prompt\'s '
            f"text back into its token ids ({text[:80]!r}).  Try: an engine that takes token ids, for example vllm"
        )

    def _requests(self, prompt: IntArray, sampling: Sampling, at: int) -> list[CompletionRequest]:
        """The requests for one prompt: one, or one per completion if the server does not support `n`."""
        if not 0 < len(prompt) < self.survey.context:
            raise RolloutError(f"prompt {at} has {len(prompt)} tokens; the context holds {self.survey.context}.")
        text = self.prompt_text(prompt)
        parts = 1 if self.survey.takes_n else sampling.n
        seeds = [derive_seed(sampling.seed, f"request/{at}/{part}") for part in range(parts)]
        return [
            CompletionRequest(prompt, text, replace(sampling, n=sampling.n // parts, seed=seed), self.policy.stop_ids)
            for seed in seeds
        ]

    def _counter(self, total: int) -> Callable[[int], None]:
        """A function that reports progress when it is given the number of completions that arrived."""
        done = 0

        def count(more: int) -> None:
            nonlocal done
            done += more
            self.progress("sampling", done, total)

        return count

    async def _draw(self, requests: Sequence[CompletionRequest], count: Callable[[int], None]) -> list[ServedRow]:
        async def one(request: CompletionRequest) -> list[ServedRow]:
            server, results = await self.fleet.complete(request)
            count(len(results))
            return [
                (server, Row(request.prompt_ids, np.array(a.token_ids, np.int64), np.array(a.logprobs, np.float32)))
                for a in results
            ]

        return [drawn for group in await gather_all([one(request) for request in requests]) for drawn in group]

    async def _one(self, turn: Turn) -> ServedRow:
        # A turn depends on its own seed and prompt only.
        request = self._requests(turn.prompt_ids, replace(turn.sampling, n=1), 0)
        return (await self._draw(request, self._counter(1)))[0]

    def _with_sampled_logprobs(self, rows: list[Row], sampling: Sampling) -> list[Row]:
        """Rows with the log-probs of the sampled distribution."""
        if sampling.is_greedy:
            return [replace(row, logprobs_T=np.zeros_like(row.logprobs_T)) for row in rows]
        reported = self.survey.reported(sampling)
        if reported == replace(sampling, n=1, seed=0):
            return rows
        # The server's deviation is added to the recomputed log-probs: every row stays comparable with the
        # trainer's, and the ratio accounts for the server's rounding.
        with self.policy.turns:
            own, theirs = self.scorer.logprobs_under(rows, (sampling, reported))
        return [
            replace(row, logprobs_T=sampled_T + (row.logprobs_T - reported_T))
            for row, sampled_T, reported_T in zip(rows, own, theirs, strict=True)
        ]

    def _prove(self, drawn: Sequence[ServedRow], sampling: Sampling) -> None:
        """Rescore a few completions of each server under the newest, the previous and the base weights.

        Skipped for greedy decoding, whose reported log-probs differ between servers.
        """
        if sampling.is_greedy:
            return
        reported = self.survey.reported(sampling)
        for server in self.fleet.servers:
            rows = _some([row for one, row in drawn if one is server], derive_seed(sampling.seed, "proof"))
            if not rows:
                continue
            with self.policy.turns:
                newest = np.concatenate(self.scorer.logprobs(rows, reported))
                older = {}
                for name, state in (("the previous adapter", self.previous), ("the base model", self.scorer.base())):
                    if state:
                        with self.scorer.using(state):
                            older[name] = np.concatenate(self.scorer.logprobs(rows, reported))
            server_T = np.concatenate([row.logprobs_T for row in rows])
            verdict = identify_weights(server_T, newest, older, max(MIN_LIMIT, START_FACTOR * self.survey.mismatch))
            self.verdicts.append(verdict)
            if verdict.wrong:
                raise RolloutError(
                    f"{server.url} does not sample from the newest policy: its log-probs are those of {verdict.wrong} "
                    f"(mean difference from the trainer's: {verdict.mismatch_mean:.4f}). Nothing was trained on them.  "
                    "Try: check who else loads adapters there, restart it, and resume"
                )
            self._prove_sampling(server, rows, sampling)

    def _prove_sampling(self, server: Server, rows: Sequence[Row], sampling: Sampling) -> None:
        """Raise if tokens were sampled with a different temperature or filter than requested."""
        asked = replace(sampling, max_tokens=1, n=1, seed=0, first=0)
        with self.policy.turns:
            surplus = self.scorer.surplus(rows, asked)
        found = self.surplus.get((server.url, asked), Surplus()) + surplus
        self.surplus[server.url, asked] = found
        if found.sharpening:
            how = "likelier" if found.sharpening > 0 else "less likely"
            raise RolloutError(
                f"{server.url} does not sample as requested: its tokens are {how} than temperature "
                f"{sampling.temperature:g} explains (inverse temperature {found.sharpening:+.0%}, "
                f"{abs(found.total) / found.variance**0.5:.0f} standard errors). It looks like another temperature, or "
                "filters such as top_k that were not requested. Nothing was trained on these samples.  "
                "Try: check the server's sampling defaults, restart it, and resume"
            )

    def _completions(self, rows: Sequence[Row]) -> list[Completion]:
        texts = self.tokenizer.batch_decode([row.token_ids_T for row in rows], skip_special_tokens=True)
        return [
            Completion(
                token_ids_T=row.token_ids_T,
                logprobs_T=row.logprobs_T,
                text=text,
                finish_reason="stop" if int(row.token_ids_T[-1]) in self.policy.stop_ids else "length",
            )
            for row, text in zip(rows, texts, strict=True)
        ]


def _some(rows: Sequence[Row], seed: int) -> list[Row]:
    """A random sample of rows, or all if there are few."""
    chosen: list[Row] = []
    tokens = 0
    for at in np.random.default_rng(seed).permutation(len(rows)):
        if len(chosen) >= PROOF_ROWS and tokens >= PROOF_TOKENS:
            break
        chosen.append(rows[int(at)])
        tokens += len(chosen[-1].token_ids_T)
    return chosen
