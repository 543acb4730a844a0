import os
import py_compile
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pausing import linux_only, pause

from retrain.config.schema import Reward, RewardTerm
from retrain.errors import PluginError
from retrain.rewards import Item, RewardPool, RewardSpec, TermSpec, build_reward, sandbox

HERE = str(Path(__file__).parent)
ROOT = str(Path(__file__).parents[2])


def custom(function: str = "score", **options) -> RewardPool:
    spec = RewardSpec((TermSpec("custom", custom_module="hostile", custom_function=function),), search_paths=(HERE,))
    return RewardPool(spec, **{"timeout_s": 1.0, "workers": 1, **options})


@pytest.fixture(scope="module")
def pool():
    with custom(workers=2) as pool:
        yield pool


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("raise", "ValueError: this response is cursed"),
        ("print then raise", "RuntimeError: printed"),
        ("nan", "the reward returned nan; it must be finite"),
        ("inf", "the reward returned inf; it must be finite"),
        ("text", "the reward returned '1.0' (str); it must return a number or a bool"),
        ("lambda", "the reward returned <function"),
        ("vector", "the reward returned array([1., 1.]) (ndarray); it must return a number: only"),
        ("huge", "OverflowError: int too large to convert to float"),
        ("os._exit", "the reward process exited with status 3"),
        ("sys.exit", "SystemExit: 4"),
        ("keyboard", "KeyboardInterrupt"),
        ("recursion", "RecursionError: maximum recursion depth exceeded"),
        ("segfault", "the reward process died: Segmentation fault"),
        ("input", "EOFError: EOF when reading a line"),
    ],
)
def test_a_misbehaving_item_is_an_error_and_its_neighbours_are_scored(pool, response, message):
    first, bad, last = pool.score([("fine", ""), (response, ""), ("fine", "")])
    assert (first.value, first.outcome) == (last.value, last.outcome) == (0.25, "wrong")
    assert (bad.value, bad.outcome, bad.counts) == (0.0, "error", False)
    assert bad.detail.splitlines()[0].startswith(message)
    # What is said about a value that was returned needs no traceback.
    assert not (message.startswith("the reward returned") and "Traceback" in bad.detail)


@pytest.mark.parametrize("response", ["hang", "hang in C", "child"])
def test_an_item_that_hangs_is_a_timeout_that_says_where(pool, response):
    began = time.monotonic()
    scores = pool.score([("fine", ""), (response, "601"), ("fine", ""), ("true", "")])
    assert [score.outcome for score in scores] == ["wrong", "timeout", "wrong", "right"]
    assert scores[1].detail.startswith("no result after 1 s\n")
    assert "hostile.py" in scores[1].detail and "worker.py" not in scores[1].detail
    assert time.monotonic() - began < 30.0


@pytest.mark.parametrize("response", ["print", "close streams", "thread", "true", "int", "fork", "fork and raise"])
def test_an_odd_item_that_returns_a_number_is_scored(pool, capfd, response):
    scores = pool.score([("fine", ""), (response, ""), ("fine", "")])
    assert [score.outcome for score in scores] == ["wrong", "right", "wrong"]
    assert capfd.readouterr() == ("", "")


STRAY_REPLIES = [
    "not JSON",
    "[]",
    '{"kind": "ready"}',
    '{"kind": "value", "value": 1.0, "number": 99}',
    '{"kind": "value", "value": "high"}',
    '{"kind": "value", "value": NaN}',
    '{"kind": "value", "surprise": 1}',
    "[" * 100_000,
]


@pytest.mark.parametrize("reply", STRAY_REPLIES, ids=range(len(STRAY_REPLIES)))
def test_a_reply_that_was_not_due_costs_one_item_and_never_lands_on_another(reply):
    with custom() as pool:
        pool.score([("fine", "")] * 20)  # from here on several items go out at once
        scores = pool.score([("fine", ""), ("stray", reply), ("fine", ""), ("fine", "")])
        assert [score.outcome for score in scores] == ["wrong", "error", "wrong", "wrong"]
        assert scores[1].detail == "the reward process sent an unexpected reply and was replaced"
        assert [score.outcome for score in pool.score([("true", ""), ("fine", "")])] == ["right", "wrong"]


def test_a_reply_that_comes_while_a_worker_is_idle_is_nobodys_error():
    with custom() as pool:
        before = pool._workers[0]
        assert pool.score([("late", '{"kind": "value"}')])[0].outcome == "right"
        time.sleep(0.6)
        assert [score.outcome for score in pool.score([("true", ""), ("fine", "")])] == ["right", "wrong"]
        assert pool._workers[0] is not before


def test_a_module_that_forks_while_it_is_imported_is_loaded_once(tmp_path):
    (tmp_path / "forking_reward.py").write_text(
        "import os\nchild = os.fork()\nif child:\n    os.waitpid(child, 0)\n"
        "def score(response, reference):\n    return 1.0 if child else 0.0\n"
    )
    spec = RewardSpec((TermSpec("custom", custom_module="forking_reward"),), search_paths=(str(tmp_path),))
    with RewardPool(spec, workers=1) as pool:
        assert [score.value for score in pool.score([("", "")] * 3)] == [1.0] * 3


def test_rewards_beyond_a_million_are_errors():
    with custom("number") as pool:
        scores = pool.score([("1e6", ""), ("-1e6", ""), ("1000001", ""), ("-1e308", "")])
    assert [score.outcome for score in scores] == ["right", "wrong", "error", "error"]
    message = "the reward returned {}; it must be between -1,000,000 and 1,000,000"
    assert [score.detail.splitlines()[0] for score in scores[2:]] == [
        message.format("1000001.0"),
        message.format("-1e+308"),
    ]


def test_an_error_shows_the_users_frames_and_what_was_printed(pool):
    (score,) = pool.score([("print then raise", "")])
    assert "hostile.py" in score.detail and 'raise RuntimeError("printed")' in score.detail
    assert "worker.py" not in score.detail
    assert score.detail.splitlines()[-2:] == ["printed:", "the last thing I saw"]


def test_the_first_error_is_kept_to_be_shown():
    with custom() as pool:
        assert pool.first_error == ""
        pool.score([("fine", ""), ("raise", ""), ("none", "")])
        pool.score([("none", "")])
        assert pool.first_error.startswith("ValueError: this response is cursed\nTraceback")


def test_a_worker_that_takes_too_much_memory_loses_only_that_item():
    with custom(memory_mb=2048) as pool:
        outcomes = [score.outcome for score in pool.score([("true", ""), ("memory", ""), ("true", "")])]
        assert outcomes == ["right", "error", "right"]
        assert pool.first_error.startswith("MemoryError")


def test_a_batch_in_which_every_item_kills_its_worker_still_ends():
    # On a busy machine a new worker may take longer to start than an item usually may.
    with custom(workers=2, timeout_s=30.0) as pool:
        assert {score.outcome for score in pool.score([("os._exit", "")] * 6)} == {"error"}
        assert [score.outcome for score in pool.score([("true", "")])] == ["right"]


def test_a_hanging_item_is_ended_in_time_while_other_workers_stay_busy():
    with custom(workers=2) as pool:
        pool.score([("fine", "")] * 20)
        began = time.monotonic()
        scores = pool.score([("hang", "")] + [("nap", "")] * 200)
    assert scores[0].outcome == "timeout"
    assert {score.outcome for score in scores[1:]} == {"wrong"}
    assert time.monotonic() - began < 8.0


def test_results_come_in_order_and_do_not_depend_on_the_number_of_workers():
    items = [(str(number), "") for number in range(40)]
    results = []
    for workers in (1, 3):
        with custom("slow_square", workers=workers) as pool:
            results.append(pool.score(items))
    assert results[0] == results[1]
    assert [score.value for score in results[0]] == [float(number**2) for number in range(40)]


def test_none_is_a_reward_that_does_not_apply(pool):
    first, none, last = pool.score([("fine", ""), ("none", ""), ("fine", "")])
    assert first.outcome == last.outcome == "wrong"
    assert (none.value, none.outcome, none.counts, none.failed) == (0.0, "none", False, False)
    assert none.detail == "the reward returned None"


def test_a_whole_point_is_right_and_less_is_wrong():
    with custom("Length") as pool:
        scores = pool.score([("1234567890", ""), ("12345", ""), ("", "")])
    assert [(score.value, score.outcome) for score in scores] == [(1.0, "right"), (0.5, "wrong"), (0.0, "wrong")]


def test_what_counts_as_right_can_be_configured():
    section = Reward(
        type="custom", custom_module="hostile", custom_function="Length", workers=1, timeout_s=1.0, correct_from=0.4
    )
    with build_reward(section, [HERE]) as pool:
        scores = pool.score([("12345", ""), ("1234", ""), ("123", "")])
    assert [score.outcome for score in scores] == ["right", "right", "wrong"]


def test_weights_that_add_up_to_one_make_a_right_answer_in_spite_of_rounding():
    assert 0.6 + 0.3 + 0.1 < 1.0
    section = Reward(workers=1, terms=tuple(RewardTerm(weight=weight) for weight in (0.6, 0.3, 0.1)))
    with build_reward(section) as pool:
        (score,) = pool.score([(r"\boxed{1}", "1")])
    assert score.outcome == "right"


def test_async_functions_are_awaited_and_bounded():
    with custom("score_async") as pool:
        scores = pool.score([("a", "a"), ("raise", ""), ("hang", ""), ("a", "b")])
    assert [score.outcome for score in scores] == ["right", "error", "timeout", "wrong"]
    assert scores[1].detail.startswith("ValueError: async and cursed")


def test_a_function_may_run_an_event_loop_of_its_own():
    with custom("loop_of_its_own") as pool:
        assert pool.score([("a", "a")])[0].outcome == "right"


def test_a_function_that_names_prompt_and_meta_gets_them():
    with custom("score_with_extras") as pool:
        (score,) = pool.score([Item("2", "2", prompt="What is 1+1?", meta={"bonus": 0.75, "unused": object})])
    assert score.value == 0.75
    with custom("score_with_any") as pool:
        assert pool.score([("2", "2")])[0].value == 2.0


def test_meta_that_cannot_be_sent_is_an_error_that_says_so_and_the_pool_lives_on():
    with custom("score_with_any") as pool:
        with pytest.raises(PluginError, match="meta of an example cannot be sent to the reward"):
            pool.score([Item("2", "2", meta={"function": lambda: 1})])
        deep: list[object] = []
        for _ in range(100_000):
            deep = [deep]
        with pytest.raises(PluginError, match="meta of an example cannot be sent to the reward"):
            pool.score([Item("2", "2", meta={"deep": deep})])
        assert pool.score([("2", "2")])[0].value == 2.0


def test_text_of_every_kind_arrives_unchanged():
    odd = ["", "\0", "\ud800 half a pair", "日本語 \u2028", "x" * 300_000]
    with custom("score_async", timeout_s=5.0) as pool:
        assert {score.outcome for score in pool.score([(text, text) for text in odd])} == {"right"}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("missing", "'hostile' has no 'missing'"),
        ("needs_three", "cannot be called as score"),
        ("NOT_A_REWARD", "neither a function nor an object with a score method"),
    ],
)
def test_a_function_that_cannot_be_a_reward_is_rejected_at_the_start(function, message):
    with pytest.raises(PluginError, match=message):
        custom(function)


def test_a_module_that_is_missing_or_broken_is_rejected_at_the_start(tmp_path):
    def start(module: str) -> RewardPool:
        spec = RewardSpec((TermSpec("custom", custom_module=module),), search_paths=(str(tmp_path),))
        return RewardPool(spec, workers=2)

    (tmp_path / "broken_reward.py").write_text("print('noise')\nraise OSError('no such grader')\n")
    (tmp_path / "exiting_reward.py").write_text("import os\nprint('bye')\nos._exit(7)\n")
    with pytest.raises(PluginError, match="there is no module 'absent_reward'"):
        start("absent_reward")
    with pytest.raises(PluginError, match=r"OSError\('no such grader'\)(.|\n)*broken_reward.py"):
        start("broken_reward")
    with pytest.raises(PluginError, match=r"exited during start-up .*status 7\nbye"):
        start("exiting_reward")


def test_a_module_that_takes_long_to_import_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "NOTE_AFTER_S", 0.1)
    (tmp_path / "slow_reward.py").write_text("import time\ntime.sleep(2)\ndef score(response, reference): return 1.0\n")
    spec = RewardSpec((TermSpec("custom", custom_module="slow_reward"),), search_paths=(str(tmp_path),))
    logged = []
    with RewardPool(spec, workers=1, log=logged.append) as pool:
        assert pool.score([("a", "b")])[0].value == 1.0
    (line,) = logged
    assert line.startswith("Still importing the reward ") and line.endswith("; the run gives up after 300 s.")


def test_a_class_an_object_and_a_function_all_serve_by_dotted_path():
    for path in ("hostile.Length", "hostile:LENGTH", "hostile.score_async"):
        with RewardPool(RewardSpec((TermSpec(path),), search_paths=(HERE,)), workers=1) as pool:
            assert pool.score([("0123456789", "0123456789")])[0].value == 1.0


def test_scoring_works_from_several_threads_at_once():
    results = {}
    with custom("slow_square", workers=2) as pool:

        def run(number: int) -> None:
            results[number] = [score.value for score in pool.score([(str(number), "")] * 5)]

        threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {number: [float(number**2)] * 5 for number in range(6)}


def test_an_interrupt_during_scoring_leaves_a_pool_that_works():
    with custom(timeout_s=30.0) as pool:
        # To the main thread, as a terminal does: a signal raised in the timer's own thread would wake nobody.
        timer = threading.Timer(0.3, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pool.score([("hang", ""), ("true", "")])
        timer.join()
        assert [score.outcome for score in pool.score([("true", ""), ("fine", "")])] == ["right", "wrong"]


def test_an_idle_worker_that_was_killed_is_replaced_without_blame():
    with custom() as pool:
        before = pool._workers[0]
        assert pool.score([("true", "")])[0].outcome == "right"
        os.kill(before._process.process.pid, signal.SIGKILL)
        # Without reaping it: that is the pool's part.
        os.waitid(os.P_PID, before._process.process.pid, os.WEXITED | os.WNOWAIT)
        assert pool.score([("true", "")])[0].outcome == "right"
        assert pool._workers[0] is not before


def test_a_closed_pool_says_so_and_closing_twice_is_fine():
    pool = custom()
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.score([("fine", "")])


def test_no_items_give_no_scores(pool):
    assert pool.score([]) == []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("response", ["", "hang", "hang in C", "child", "daemon and hang"])
def test_workers_do_not_outlive_a_parent_that_was_killed(response):
    script = f"""
import sys, threading, time
from retrain.rewards import RewardPool, RewardSpec, TermSpec
term = TermSpec("custom", custom_module="hostile", custom_function="score")
pool = RewardPool(RewardSpec((term,), search_paths=({HERE!r},)), timeout_s=1.0, workers=2)
threading.Thread(target=pool.score, args=([({response!r}, "602")] * 2,), daemon=True).start()
time.sleep(0.5)
print(*(worker._process.process.pid for worker in pool._workers), flush=True)
time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": ROOT}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    until = time.monotonic() + 10.0
    while any(is_running(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)
    while has_process("sleep 602") and time.monotonic() < until:
        time.sleep(0.05)
    assert not has_process("sleep 602")


def has_process(command: str) -> bool:
    return command in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout.splitlines()


def test_what_an_item_started_dies_with_its_worker():
    with custom() as pool:
        assert pool.score([("child", "603")])[0].outcome == "timeout"
    assert not has_process("sleep 603")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a guard adopt orphans")
@pytest.mark.parametrize(
    ("response", "outcome", "seconds"),
    [("daemon", "wrong", "604"), ("daemon and hang", "timeout", "606"), ("daemon and die", "error", "607")],
)
def test_a_process_in_a_session_of_its_own_dies_with_its_worker(response, outcome, seconds):
    with custom() as pool:
        assert pool.score([(response, seconds)])[0].outcome == outcome
    assert not has_process(f"sleep {seconds}")


@linux_only
def test_a_pause_of_the_whole_run_is_no_timeout():
    with custom(timeout_s=3.0) as pool, pause(5.0, after_s=0.2):
        assert [score.outcome for score in pool.score([("work", "")])] == ["wrong"]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_whose_guard_was_killed_dies_too():
    with custom() as pool:
        guard = pool._workers[0]._process.process.pid
        (worker,) = children_of(guard)
        os.kill(guard, signal.SIGKILL)
        until = time.monotonic() + 5.0
        while is_running(worker) and time.monotonic() < until:
            time.sleep(0.02)
        assert not is_running(worker)
        assert pool.score([("true", "")])[0].outcome == "right"


def test_no_worker_loads_heavy_libraries_and_neither_does_the_import():
    with custom("modules") as pool:
        assert pool.score([("", "")])[0].value == 1.0
    heavy = {"torch", "transformers", "datasets", "sympy"}
    check = f"import sys, retrain.rewards, retrain.data; print({heavy} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": ROOT}
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, env=environment, check=True)
    assert found.stdout.strip() == "set()"


def test_cheap_rewards_are_not_held_up_by_the_trip():
    items = [(f"\\boxed{{{number % 7}}}", "3") for number in range(4000)]
    with RewardPool(RewardSpec(), workers=1) as pool:
        pool.score(items[:200])
        began = time.monotonic()
        scores = pool.score(items)
        rate = len(items) / (time.monotonic() - began)
    assert sum(score.outcome == "right" for score in scores) == len([n for n in range(4000) if n % 7 == 3])
    assert rate > 200  # about 6,000 on an idle core; a busy test machine gets slack


def test_a_reward_sees_no_key_of_the_environment_unless_it_is_passed_on(monkeypatch):
    monkeypatch.setenv("ACME_API_KEY", "opensesame99")
    with custom("leak") as pool:
        printed, missed = pool.score([("print", ""), ("ACME_API_KEY", "")])
    assert printed.outcome == "error" and "'PATH'" in printed.detail
    assert "ACME_API_KEY" not in printed.detail and "opensesame99" not in printed.detail
    assert "https://***@host.example/v1" in printed.detail and "hunter2" not in printed.detail
    assert missed.detail.splitlines()[-1] == (
        'Rewards do not see ACME_API_KEY.  Try: [reward] pass_env = ["ACME_API_KEY"]'
    )
    with custom("leak", pass_env=("ACME_*",)) as pool:
        printed, found = pool.score([("print", ""), ("ACME_API_KEY", "")])
    assert found.value == 12.0
    assert "'ACME_API_KEY': '***'" in printed.detail and "opensesame99" not in printed.detail


def test_the_options_of_the_file_reach_the_processes(monkeypatch):
    monkeypatch.setenv("ACME_API_KEY", "opensesame99")
    logged = []
    section = Reward(type="hostile.leak", workers=1, memory_mb=3000, pass_env=("ACME_API_KEY", "ABSENT"))
    with build_reward(section, [HERE], logged.append) as pool:
        assert pool.score([("ACME_API_KEY", "")])[0].value == 12.0
    assert logged == ["Warning: [reward] pass_env lists ABSENT, which is not set"]
    with build_reward(Reward(type="hostile.score", workers=1, memory_mb=10**14), [HERE]) as pool:
        assert pool.score([("int", "")])[0].value == 1.0
    limited = Reward(type="hostile.score", workers=1, memory_mb=2048)
    with build_reward(limited, [HERE]) as pool:
        assert pool.score([("memory", "")])[0].detail.startswith("MemoryError")


def test_a_replaced_worker_uses_the_code_of_the_first_where_a_link_leads_elsewhere_by_then(tmp_path):
    (tmp_path / "shared").mkdir()
    score = "import os\ndef score(response, reference):\n    response == 'die' and os._exit(3)\n    return {}\n"
    for name, value in (("one", 1.0), ("two", 2.0)):
        (tmp_path / "shared" / f"{name}.py").write_text(score.format(value))
    link = tmp_path / "linked.py"
    link.symlink_to("shared/one.py")
    spec = RewardSpec((TermSpec("custom", custom_module="linked"),), search_paths=(str(tmp_path),))
    with RewardPool(spec, workers=1) as pool:
        link.unlink()
        link.symlink_to("shared/two.py")
        died, scored = pool.score([("die", "b"), ("a", "b")])
    assert (died.outcome, scored.value) == ("error", 1.0)


def test_a_replaced_worker_uses_the_code_of_the_first_that_an_entry_point_names(tmp_path, monkeypatch):
    (tmp_path / "mine-1.dist-info").mkdir()
    (tmp_path / "mine-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (tmp_path / "mine-1.dist-info" / "entry_points.txt").write_text("[retrain.reward]\nkept = kept_parts:score\n")
    score = "import os\ndef score(response, reference):\n    response == 'die' and os._exit(3)\n    return {}\n"
    (tmp_path / "kept_parts.py").write_text(score.format(1.0))
    monkeypatch.syspath_prepend(str(tmp_path))
    with build_reward(Reward(type="kept", workers=1), []) as pool:
        (tmp_path / "kept_parts.py").write_text(score.format(2.0))
        died, scored = pool.score([("die", "b"), ("a", "b")])
    assert (died.outcome, scored.value) == ("error", 1.0)


def become_packages(folder):
    for name in ("mine", "helper"):
        (folder / f"{name}.py").unlink()
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("def score(response, reference): return 2.0\nVALUE = 2.0\n")


def shadow(folder):
    for name in ("mine", "helper"):
        (folder / "earlier" / f"{name}.py").write_text("def score(response, reference): return 2.0\nVALUE = 2.0\n")


def remove(folder):
    shutil.rmtree(folder / "spread")
    for name in ("mine.py", "helper.py"):
        (folder / name).unlink()


def become_regular(folder):
    for package in ("spread", "earlier/helper", "spread/inner"):
        (folder / package / "__init__.py").write_text("VALUE = 2.0\n")


@pytest.mark.parametrize("change", [become_packages, become_regular, shadow, remove])
def test_a_replaced_worker_uses_the_code_of_the_first_whatever_became_of_the_files(tmp_path, change):
    (tmp_path / "earlier" / "helper").mkdir(parents=True)
    (tmp_path / "spread" / "inner").mkdir(parents=True)
    (tmp_path / "spread" / "inner" / "parts.py").write_text("VALUE = 0.25\n")
    (tmp_path / "helper.py").write_text("VALUE = 0.5\n")
    (tmp_path / "mine.py").write_text(
        "import os\nfrom helper import VALUE\nfrom spread.inner import parts\ndef score(response, reference):\n"
        "    response == 'die' and os._exit(3)\n    return VALUE + parts.VALUE\n"
    )
    paths = (str(tmp_path / "earlier"), str(tmp_path))
    with RewardPool(RewardSpec((TermSpec("custom", custom_module="mine"),), search_paths=paths), workers=1) as pool:
        change(tmp_path)
        died, scored = pool.score([("die", "b"), ("a", "b")])
    assert (died.outcome, scored.outcome, scored.value) == ("error", "wrong", 0.75)


VALUE = "def score(response, reference): return VALUE\n"
BY_PATH = {
    "a folder in front": {
        "mine.py": "import os, sys\nsys.path.insert(0, os.path.dirname(__file__) + '/lib')\n"
        f"from tools import VALUE\n{VALUE}",
        "tools.py": "VALUE = 2.0\n",
        "lib/tools.py": "VALUE = 0.5\n",
    },
    "a package's own path": {
        "mine.py": f"from dynamic.part import VALUE\n{VALUE}",
        "dynamic/__init__.py": "import os\n__path__.insert(0, os.path.dirname(__file__) + '/other')\n",
        "dynamic/part.py": "VALUE = 2.0\n",
        "dynamic/other/part.py": "VALUE = 0.5\n",
    },
    "files of a package without an init": {
        "mine/score.py": "import importlib.resources as resources\n"
        f"VALUE = float(resources.files(__package__).joinpath('value.txt').read_text())\n{VALUE}",
        "mine/value.txt": "0.5",
    },
    "a compiled init": {
        "mine/__init__.py": "FLAG = 0.5\n",
        "mine/score.py": f"from mine import FLAG as VALUE\n{VALUE}",
    },
}


@pytest.mark.parametrize("case", BY_PATH)
def test_a_worker_imports_what_python_does(tmp_path, case):
    for name, text in BY_PATH[case].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    if "compiled" in case:
        init = tmp_path / "mine" / "__init__.py"
        py_compile.compile(str(init), str(init.with_suffix(".pyc")))
        init.unlink()
    module = "mine.score" if (tmp_path / "mine").exists() else "mine"
    spec = RewardSpec((TermSpec("custom", custom_module=module),), search_paths=(str(tmp_path),))
    with RewardPool(spec, workers=1) as pool:
        assert [score.value for score in pool.score([("a", "b")])] == [0.5]


def test_a_replaced_worker_uses_the_code_of_the_first(tmp_path):
    (tmp_path / "kept").mkdir()
    score = (
        "import os\nimport beside\nfrom kept.own import VALUE\n"
        "def score(response, reference):\n    response == 'die' and os._exit(3)\n    return VALUE + beside.VALUE\n"
    )
    files = {
        "kept/__init__.py": "",
        "kept/score.py": score,
        "kept/own.py": "VALUE = 1.0\n" + "# long\n" * 100_000,
        "beside.py": "VALUE = 0.5\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    spec = RewardSpec((TermSpec("custom", custom_module="kept.score"),), search_paths=(str(tmp_path),))
    with RewardPool(spec, workers=1) as pool:
        assert [score.value for score in pool.score([("a", "b")])] == [1.5]
        (tmp_path / "beside.py").write_text("VALUE = 100.0  # edited\n")
        (tmp_path / "kept" / "own.py").write_text("VALUE = 1000.0  # edited\n")
        # Another program compiles the new version.
        subprocess.run([sys.executable, "-c", "import kept.score"], cwd=tmp_path, check=True)
        (tmp_path / "kept" / "score.py").write_text("def score(:  # half of an edit\n")
        scores = pool.score([("die", "b"), ("a", "b")])
        assert [score.outcome for score in scores] == ["error", "right"] and scores[1].value == 1.5
    # What it compiled is not left for others.
    (tmp_path / "kept" / "score.py").write_text(score)
    shown = subprocess.run(
        [sys.executable, "-c", "import kept.score; print(kept.score.score('a', 'b'))"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert shown.stdout == "1100.0\n"
