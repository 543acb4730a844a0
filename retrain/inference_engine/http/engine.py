"""An InferenceEngine over servers: samples there, and makes sure here that it was the right policy.

Log-probs come back as the distribution that was sampled from. Where a server reports others, the trainer computes them
itself, with the weights that the server holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from retrain.config.schema import Inference
from retrain.errors import ConfigError, RolloutError
from retrain.inference_engine import Progress, Turn, Turns
from retrain.inference_engine.http.adapters import AdapterFolder
from retrain.inference_engine.http.client import Client, gather_all
from retrain.inference_engine.http.fleet import Fleet, Server
from retrain.inference_engine.http.proof import PolicyScorer, Row, State, Surplus, Verdict, judge
from retrain.inference_engine.http.startup import Startup, Survey
from retrain.inference_engine.http.wire import OPTIONS, Adapter, Ask, Wire
from retrain.modeling.policy import Policy
from retrain.seeding import derive_seed
from retrain.types import Completion, IntArray, Sampling, StepMetrics

# Completions rescored for a server at each call, more of them where they are short; and how far apart a sound server
# and trainer may be on average: this much, or this many times what they were apart at the start.
PROOF_ROWS, PROOF_TOKENS = 4, 512
LEAST_LIMIT, TIMES_AT_START = 0.05, 10.0

Drawn = tuple[Server, Row]


class HttpEngine:
    """Samples on one or several servers of one kind."""

    def __init__(self, wire: Wire, policy: Policy, inference: Inference, tokenizer: Any, progress: Progress) -> None:
        self.wire, self.policy, self.tokenizer, self.progress = wire, policy, tokenizer, progress
        urls = [part.strip().rstrip("/").removesuffix("/v1") for part in inference.url.split(",") if part.strip()]
        self.client = Client(inference.timeout_s)
        urls = list(dict.fromkeys(urls)) or [f"http://127.0.0.1:{wire.port}"]
        self.fleet = Fleet(wire, urls, self.client, inference.wait_s, progress)
        self.fleet.vocabulary = policy.vocabulary
        self.folder = AdapterFolder(inference.adapter_dir, wire.mlx_adapters)
        self.scorer = PolicyScorer(policy)
        self.adapter: Adapter | None = None
        self.newest: State = {}
        self.previous: State = {}
        self.survey = Survey(context=policy.context_length)
        self.verdicts: list[Verdict] = []
        self.surplus: dict[tuple[str, Sampling], Surplus] = {}
        """What was seen of each server's sampling so far, by the distribution that it was asked for."""

    def check(self, sampling: Sampling, say: Callable[[str], None]) -> int:
        """Refuse, before any training, servers that are away, hold another model or cannot do what is needed."""
        self._refuse_options(sampling)
        startup = Startup(self.wire, self.fleet, self.tokenizer, self.scorer, self.text_of)
        self.survey = startup.survey(sampling, say)
        startup.deliver_first(self.sync)
        return self.survey.context

    def sync(self, weights: object) -> None:
        """Deliver the adapter, unless the servers have it."""
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
        """Draw completions: all requests at once, shared out among the servers."""
        self._refuse_options(sampling)
        asks = [ask for at, prompt in enumerate(prompts) for ask in self._asks(prompt, sampling, at)]
        drawn = self.client.run(self._draw(asks, len(prompts) * sampling.n))
        self._prove(drawn, sampling)
        rows = self._with_sampled_logprobs([row for _, row in drawn], sampling)
        completions = self._completions(rows)
        return [completions[at : at + sampling.n] for at in range(0, len(completions), sampling.n)]

    def serve(self, turns: Turns) -> None:
        """Sample turns as they come, all at once; those that fail say so to whoever waits for them."""
        drawn: list[tuple[Drawn, Sampling]] = []
        answers: list[Future[Completion]] = []
        # One thread: rescoring shares one model.
        with ThreadPoolExecutor(1, "retrain-turns") as after:

            def finish(turn: Turn, begun: Future[Drawn]) -> None:
                try:
                    drawn.append((begun.result(), turn.sampling))
                    rows = self._with_sampled_logprobs([begun.result()[1]], turn.sampling)
                    completion = self._completions(rows)[0]
                except Exception as error:
                    turn.answer.set_exception(error)
                else:
                    turn.answer.set_result(completion)

            while taken := turns.take(wait=True):
                for turn in taken:
                    answers.append(turn.answer)
                    begun = self.client.submit(self._one(turn))
                    begun.add_done_callback(partial(after.submit, finish, turn))  # type: ignore[call-arg]
            wait(answers)
        for failed in (answer.exception() for answer in answers):
            if failed:
                raise failed
        if drawn:
            self._prove([one for one, _ in drawn], drawn[0][1])

    def metrics(self) -> StepMetrics:
        """How well the servers' log-probs fit the newest policy, over all calls since this was asked last."""
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
        """Mean difference of the servers' log-probs from the trainer's, under the base model."""
        return self.survey.mismatch

    def shutdown(self) -> None:
        """Take our adapters off the servers and the disk."""
        if self.client.is_closed:
            return
        try:
            self.client.run(self.fleet.withdraw())
        except RolloutError:
            # The run is over; what a broken server keeps is its own affair.
            pass
        finally:
            self.client.close()
            self.folder.close()

    def text_of(self, prompt_ids: IntArray) -> str:
        """The prompt as text, for servers that take nothing else; refused where it would come back as other ids."""
        if self.wire.takes_ids:
            return ""
        ids = prompt_ids.tolist()
        # Where the server's tokenizer puts a first token before everything, the text goes without it.
        for kept in (ids, ids[1:]):
            text = str(self.tokenizer.decode(kept, skip_special_tokens=False))
            if list(self.tokenizer(text)["input_ids"]) == ids:
                return text
        raise ConfigError(
            f'[inference] engine = "{self.wire.name}" takes text, and this tokenizer does not turn a prompt\'s '
            f"text back into its token ids ({text[:80]!r}).  Try: an engine that takes token ids, for example vllm"
        )

    def _asks(self, prompt: IntArray, sampling: Sampling, at: int) -> list[Ask]:
        """The requests for one prompt: one, or one for each completion where the server makes no more of them."""
        if not 0 < len(prompt) < self.survey.context:
            raise RolloutError(f"prompt {at} has {len(prompt)} tokens; the context holds {self.survey.context}.")
        text = self.text_of(prompt)
        parts = 1 if self.survey.takes_n else sampling.n
        seeds = [derive_seed(sampling.seed, f"request/{at}/{part}") for part in range(parts)]
        return [
            Ask(prompt, text, replace(sampling, n=sampling.n // parts, seed=seed), self.policy.stop_ids)
            for seed in seeds
        ]

    async def _draw(self, asks: Sequence[Ask], total: int) -> list[Drawn]:
        done = 0

        async def one(ask: Ask) -> list[Drawn]:
            nonlocal done
            server, answers = await self.fleet.complete(ask)
            done += len(answers)
            self.progress("sampling", done, total)
            return [
                (server, Row(ask.prompt_ids, np.array(a.token_ids, np.int64), np.array(a.logprobs, np.float32)))
                for a in answers
            ]

        return [drawn for group in await gather_all([one(ask) for ask in asks]) for drawn in group]

    async def _one(self, turn: Turn) -> Drawn:
        # What is drawn for a turn depends on its own seed and prompt alone.
        ask = self._asks(turn.prompt_ids, replace(turn.sampling, n=1), 0)
        return (await self._draw(ask, 1))[0]

    def _with_sampled_logprobs(self, rows: list[Row], sampling: Sampling) -> list[Row]:
        """Rows whose log-probs are of the distribution that was sampled from."""
        if sampling.is_greedy:
            return [replace(row, logprobs_T=np.zeros_like(row.logprobs_T)) for row in rows]
        reported = self.survey.reported(sampling)
        if reported == replace(sampling, n=1, seed=0):
            return rows
        # What the server is off by in what it reports goes into what is sampled from: no row escapes the trainer's
        # comparison, and the ratio accounts for the server's rounding.
        own, theirs = self.scorer.logprobs_under(rows, (sampling, reported))
        return [
            replace(row, logprobs_T=sampled_T + (row.logprobs_T - reported_T))
            for row, sampled_T, reported_T in zip(rows, own, theirs, strict=True)
        ]

    def _prove(self, drawn: Sequence[Drawn], sampling: Sampling) -> None:
        """Rescore a few completions of each server under the newest, the previous and the base weights.

        Servers differ in which log-probs they report of greedy decoding, so there is nothing to compare.
        """
        if sampling.is_greedy:
            return
        reported = self.survey.reported(sampling)
        for server in self.fleet.servers:
            rows = _some([row for one, row in drawn if one is server], derive_seed(sampling.seed, "proof"))
            if not rows:
                continue
            newest = np.concatenate(self.scorer.logprobs(rows, reported))
            older = {}
            for name, state in (("the previous adapter", self.previous), ("the base model", self.scorer.base())):
                if state:
                    with self.scorer.holding(state):
                        older[name] = np.concatenate(self.scorer.logprobs(rows, reported))
            told = np.concatenate([row.logprobs_T for row in rows])
            verdict = judge(told, newest, older, max(LEAST_LIMIT, TIMES_AT_START * self.survey.mismatch))
            self.verdicts.append(verdict)
            if verdict.wrong:
                raise RolloutError(
                    f"{server.url} does not sample from the newest policy: its log-probs are those of {verdict.wrong} "
                    f"(mean difference to the trainer's {verdict.mismatch_mean:.4f}). Nothing was trained on them.  "
                    "Try: see who else loads adapters there, restart it, and resume"
                )
            self._prove_sampling(server, rows, sampling)

    def _prove_sampling(self, server: Server, rows: Sequence[Row], sampling: Sampling) -> None:
        """Refuse tokens that were drawn at another temperature, or from fewer tokens, than was asked for."""
        asked = replace(sampling, max_tokens=1, n=1, seed=0, first=0)
        found = self.surplus.get((server.url, asked), Surplus()) + self.scorer.surplus(rows, asked)
        self.surplus[server.url, asked] = found
        if found.sharpening:
            how = "likelier" if found.sharpening > 0 else "less likely"
            raise RolloutError(
                f"{server.url} does not sample as it was asked to: its tokens are {how} than temperature "
                f"{sampling.temperature:g} explains (inverse temperature {found.sharpening:+.0%}, "
                f"{abs(found.total) / found.variance**0.5:.0f} standard errors). It looks like another temperature, or "
                "cuts such as top_k that nobody asked for. Nothing was trained on these samples.  "
                "Try: see the server's own sampling defaults, restart it, and resume"
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

    def _refuse_options(self, sampling: Sampling) -> None:
        defaults = Sampling(max_tokens=1)
        changed = [option for option in OPTIONS if getattr(sampling, option) != getattr(defaults, option)]
        for option in changed:
            value, default = getattr(sampling, option), getattr(defaults, option)
            if option not in self.wire.options:
                raise ConfigError(
                    f'[training] {option} = {value} cannot be had from engine = "{self.wire.name}": it lacks the '
                    f"option or means something else by it.  Try: {option} = {default}"
                )
        both = [option for option in changed if option in self.wire.apart]
        if len(both) > 1:
            raise ConfigError(
                f'[training] {" and ".join(both)} cannot be had together from engine = "{self.wire.name}": it cuts by '
                f"them in another order than the trainer.  Try: {both[-1]} = {getattr(defaults, both[-1])}"
            )


def _some(rows: Sequence[Row], seed: int) -> list[Row]:
    """A few rows, drawn at random, or all where there are no more."""
    chosen: list[Row] = []
    tokens = 0
    for at in np.random.default_rng(seed).permutation(len(rows)):
        if len(chosen) >= PROOF_ROWS and tokens >= PROOF_TOKENS:
            break
        chosen.append(rows[int(at)])
        tokens += len(chosen[-1].token_ids_T)
    return chosen
