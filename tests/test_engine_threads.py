"""Streams, loops of the caller's own, threads and asyncio over one engine."""

import asyncio
import gc
import itertools
import threading
from collections.abc import Callable

import pytest
from engines import check_at_rest, check_engine, finish, joined, make_engine
from engines import quick_compilation as quick_compilation
from tiny import greedy, random_prompts, tiny_llama

from paged_jax.engine import Delta, SamplingParams, registry

pytestmark = pytest.mark.usefixtures("quick_collection")

NEW = 20
PROMPTS = random_prompts(9, 33, 20, 5, 14, 27, 2, 18, seed=40)


def params(max_tokens: int = NEW, **settings) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **settings)


def continued(prompt) -> tuple[int, ...]:
    return greedy(tiny_llama(), prompt, NEW)


def in_threads(*calls: Callable[[], object]) -> None:
    """Runs them side by side; raises what any of them raised."""
    errors: list[BaseException] = []

    def run(call):
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a thread is stuck"
    if errors:
        raise errors[0]


class TestStream:
    def test_deltas_as_they_come(self):
        engine = make_engine()
        deltas = list(engine.stream(PROMPTS[0], params(logprobs=True)))
        assert joined(deltas) == continued(PROMPTS[0])
        # One token from the prompt, then four a visit.
        assert [len(delta.token_ids) for delta in deltas] == [1, 4, 4, 4, 4, 3]
        assert [len(delta.logprobs) for delta in deltas] == [1, 4, 4, 4, 4, 3]
        assert [delta.finish_reason for delta in deltas] == [None] * 5 + ["length"]
        assert {delta.text for delta in deltas} == {None}
        check_at_rest(engine)

    def test_leaving_early_takes_the_request_back(self):
        engine = make_engine()
        other = engine.submit(PROMPTS[1], params())
        stream = engine.stream(PROMPTS[0], params(n=2))
        for delta in stream:
            if delta.index == 1:
                break
        stream.close()
        check_engine(engine)
        assert engine.metrics.aborted == 2
        assert joined(finish(engine)[other, 0]) == continued(PROMPTS[1])

    def test_a_forgotten_stream_is_taken_back(self):
        """By the garbage collector, which may come in the middle of a visit."""
        engine = make_engine()
        stream = engine.stream(PROMPTS[0], params())
        next(stream)
        cycle = [stream]
        cycle.append(cycle)
        del stream, cycle
        engine.submit(PROMPTS[1], params(), request_id="other")
        deliver = engine._requests.deliver

        def deliver_and_collect(news):
            gc.collect()
            with engine._requests.lock:
                gc.collect()
            deliver(news)

        engine._requests.deliver = deliver_and_collect
        assert joined(finish(engine)["other", 0]) == continued(PROMPTS[1])
        assert engine.metrics.aborted == 1

    def test_samples_come_side_by_side(self):
        engine = make_engine()
        settings = {"temperature": 1.0, "seed": 7}
        deltas = list(engine.stream(PROMPTS[0], params(n=3, **settings)))
        for index in range(3):
            (single,) = engine.generate([PROMPTS[0]], params(**{**settings, "seed": 7 + index}))
            assert joined([delta for delta in deltas if delta.index == index]) == single.token_ids
        assert sorted(delta.index for delta in deltas if delta.finish_reason) == [0, 1, 2]

    def test_an_abort_ends_the_stream(self):
        engine = make_engine()
        stream = engine.stream(PROMPTS[0], params())
        first = next(stream)
        engine.abort(first.request_id)
        assert [delta.finish_reason for delta in stream] == ["abort"]

    def test_two_streams_share_their_visits(self):
        engine = make_engine()
        streams = [engine.stream(prompt, params()) for prompt in PROMPTS[:2]]
        for deltas in zip(*streams, strict=False):
            assert {delta.request_id for delta in deltas} == {"request-0", "request-1"}
        for stream in streams:
            list(stream)
        assert engine.metrics.visits <= 8
        check_at_rest(engine)


class TestStep:
    def test_the_callers_own_loop(self):
        """Requests come while others run; what streams and `generate` ask for does not come here."""
        engine = make_engine()
        assert engine.step() == []
        assert not engine.has_work
        waiting, texts = list(enumerate(PROMPTS)), {}
        stream = engine.stream(PROMPTS[0], params())
        while engine.has_work or waiting:
            if waiting:
                number, prompt = waiting.pop()
                engine.submit(prompt, params(), request_id=str(number))
            for delta in engine.step():
                texts[delta.request_id] = texts.get(delta.request_id, ()) + delta.token_ids
        assert texts == {str(number): continued(prompt) for number, prompt in enumerate(PROMPTS)}
        assert joined(list(stream)) == continued(PROMPTS[0])
        check_at_rest(engine)

    def test_generate_leaves_the_deltas_of_others_alone(self):
        engine = make_engine()
        engine.submit(PROMPTS[0], params(), request_id="submitted")
        (output,) = engine.generate([PROMPTS[1]], params())
        assert output.token_ids == continued(PROMPTS[1])
        assert engine.has_work
        assert joined(finish(engine)["submitted", 0]) == continued(PROMPTS[0])


class TestThreads:
    def test_many_submit_while_one_drives(self):
        engine = make_engine()
        expected = {
            f"{thread}-{i}": continued(prompt) for i, prompt in enumerate(PROMPTS) for thread in range(4)
        }
        texts, done = {}, threading.Event()

        def submit(thread):
            for i, prompt in enumerate(PROMPTS):
                engine.submit(prompt, params(), request_id=f"{thread}-{i}")

        def drive():
            while not done.is_set() or engine.has_work:  # the other way round, all may come in between
                for delta in engine.step():
                    texts[delta.request_id] = texts.get(delta.request_id, ()) + delta.token_ids

        def submit_all():
            in_threads(*(lambda thread=thread: submit(thread) for thread in range(4)))
            done.set()

        in_threads(drive, submit_all)
        assert texts == expected
        check_at_rest(engine)

    def test_all_ways_at_once(self):
        """Three streams, two `generate`, one that takes back all it asked for, and one that steps."""
        engine = make_engine()
        results, done = {}, threading.Event()

        def stream(i):
            results[f"stream {i}"] = joined(list(engine.stream(PROMPTS[i], params())))

        def generate(i):
            outputs = engine.generate(PROMPTS[i : i + 2], params())
            results[f"generate {i}"] = [output.token_ids for output in outputs]

        def give_up():
            for prompt in PROMPTS:
                engine.abort(engine.submit(prompt, params(n=2)))
            for prompt in PROMPTS[:3]:
                next(engine.stream(prompt, params()))  # closed at once

        def step():
            while not done.is_set():
                engine.step()

        def others():
            streams = [lambda i=i: stream(i) for i in range(3)]
            in_threads(*streams, lambda: generate(3), lambda: generate(5), give_up)
            done.set()

        in_threads(step, others)
        finish(engine)
        for i in range(3):
            assert results[f"stream {i}"] == continued(PROMPTS[i])
        for i in (3, 5):
            assert results[f"generate {i}"] == [continued(prompt) for prompt in PROMPTS[i : i + 2]]
        assert engine.metrics.aborted == 2 * len(PROMPTS) + 3

    def test_a_thread_that_drives_again_and_again_lets_others_read(self):
        """Whoever waits for its turn has it after one visit, and reads what that has brought."""
        engine = make_engine()
        stream = engine.stream(PROMPTS[3], params())
        deltas, received = [next(stream)], threading.Event()
        visit, visits = engine._core.visit, itertools.count()

        def read():
            for delta in stream:
                deltas.append(delta)
                received.set()

        reader = threading.Thread(target=read, daemon=True)

        def observed_visit():
            number = next(visits)
            if number == 0:
                reader.start()
                waited = (received.wait(timeout=0.001) for _ in range(60_000))
                assert any(engine._next.locked() for _ in waited), "the reader does not wait for its turn"
            if number == 1:
                assert received.wait(timeout=60)
            visit()

        engine._core.visit = observed_visit
        engine.step()
        engine.step()
        reader.join(timeout=60)
        assert joined(deltas) == continued(PROMPTS[3])

    def test_an_abort_from_another_thread(self):
        """While nobody else will drive any more: its pages are free when the visit ends."""
        engine = make_engine()
        victim = engine.submit(PROMPTS[1], params())
        visit = engine._core.visit

        def visit_and_abort():
            in_threads(lambda: engine.abort(victim))
            assert engine.metrics.aborted == 0
            visit()

        engine._core.visit = visit_and_abort
        engine.step()
        engine._core.visit = visit
        assert engine.metrics.aborted == 1
        check_engine(engine)
        assert engine.metrics.pages_used == 0
        assert [delta.finish_reason for delta in finish(engine)[victim, 0]] == ["abort"]

    def test_nothing_is_missed_by_who_looks_in_the_middle_of_a_delivery(self, monkeypatch):
        engine = make_engine()
        stream = engine.stream(PROMPTS[0], params(), salt="read by another thread")
        deltas = [next(stream)]
        reader = threading.Thread(target=lambda: deltas.extend(stream), daemon=True)

        def make_delta(*args):
            delta = Delta(*args)
            if delta.finish_reason:
                reader.start()
                reader.join(timeout=0.1)  # it waits for its turn, or has wrongly ended
            return delta

        monkeypatch.setattr(registry, "Delta", make_delta)
        while engine.has_work:
            engine.step()
        reader.join(timeout=60)
        assert joined(deltas) == continued(PROMPTS[0])
        assert deltas[-1].finish_reason == "length"


class TestAsyncio:
    def test_eight_consumers_and_two_that_are_cancelled(self):
        """One while it waits for its first token, and one that has read some."""
        engine = make_engine()
        other = engine.submit(PROMPTS[0], params())

        async def read(i):
            return [delta async for delta in engine.astream(PROMPTS[i], params())]

        async def read_and_pause(i, reading):
            async for _ in engine.astream(PROMPTS[i], params()):
                reading.set()
                await asyncio.Event().wait()

        async def main():
            reading = asyncio.Event()
            victims = [asyncio.create_task(read(1)), asyncio.create_task(read_and_pause(2, reading))]
            tasks = [asyncio.create_task(read(i)) for i in range(8)]
            await asyncio.sleep(0)
            victims[0].cancel()
            await reading.wait()
            victims[1].cancel()
            results = await asyncio.gather(*tasks)
            return results, await asyncio.gather(*victims, return_exceptions=True)

        results, cancelled = asyncio.run(main())
        assert [joined(deltas) for deltas in results] == [continued(prompt) for prompt in PROMPTS]
        assert all(deltas[-1].finish_reason == "length" for deltas in results)
        assert [type(error) for error in cancelled] == [asyncio.CancelledError] * 2
        assert joined(finish(engine)[other, 0]) == continued(PROMPTS[0])
        assert engine.metrics.aborted >= 1

    def test_leaving_early(self):
        engine = make_engine()

        async def main():
            stream = engine.astream(PROMPTS[0], params(n=3))
            async for _ in stream:
                break
            await stream.aclose()

        asyncio.run(main())
        check_at_rest(engine)
        assert engine.metrics.aborted == 3

    def test_a_wrong_argument(self):
        engine = make_engine()

        async def main():
            async for _ in engine.astream([], params()):
                pass

        with pytest.raises(ValueError, match="one or more token ids"):
            asyncio.run(main())
        assert not engine.has_work
