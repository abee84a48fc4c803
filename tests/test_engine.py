"""The engine: every request's tokens are those of the request alone, whatever else runs."""

import codecs
import contextlib
import dataclasses
import functools
from concurrent import futures

import jax
import numpy as np
import pytest

from ladder_jax import decode, parallel
from ladder_jax.config import Loop
from ladder_jax.decode import Engine, Finish, QueueFull, Request
from ladder_jax.decode.engine.slots import buckets
from ladder_jax.decode.request import StopText
from tests import cases, compilations, engines
from tests.covering import full
from tests.engines import CAPACITY, CHUNK, parts
from tests.refusals import refused


def to_bytes(tokens):
    """Two characters for each token, one of two bytes: text is cut within tokens, and tokens within
    text.
    """
    return b"".join(bytes([97 + t % 7, *"éèêàçùâ".encode()[2 * (t % 7) :][:2]]) for t in tokens)


engine = functools.partial(engines.engine, decoder=to_bytes)
NINE = Request([1], max_new_tokens=9)


@functools.cache
def alone(request):
    """The request's tokens by Generator, on one device.

    It makes more of them, and log-probabilities: the caches have one length and the programs are
    few.
    """
    more = dict(
        max_new_tokens=CAPACITY + 16 - len(request.prompt), logprobs=True, stop=(), stop_ids=()
    )
    pieces = generator().pieces(dataclasses.replace(request, **more))
    return sum((piece.tokens for piece in pieces), ())[: request.max_new_tokens]


@functools.cache
def generator():
    return decode.Generator(*parts(tensor=1), loop=Loop.SCAN)


def requests(count, *, seed=0):
    """Prompts of all buckets, greedy and drawn, with every setting; each differs from the
    others.
    """
    rng = np.random.default_rng(seed)
    for index in range(count):
        prompt = rng.integers(0, 251, rng.integers(1, 45)).tolist()
        more = {}
        if index % 3:
            more = dict(
                temperature=rng.uniform(0.5, 2),
                top_k=int(rng.integers(0, 30)),
                top_p=rng.uniform(0.5, 1),
            )
        if index % 4 == 3:
            more["repetition_penalty"] = rng.uniform(1, 3)
        new = int(rng.integers(1, CAPACITY - len(prompt) + 1))
        yield Request(
            prompt, max_new_tokens=min(new, 20), seed=index, logprobs=index % 2 == 0, **more
        )


def check(handle):
    """A finished request against Generator's tokens, and its pieces against its result."""
    result, expected = handle.result(), alone(handle.request)
    assert result.tokens == expected[: len(result.tokens)]
    if result.finish is Finish.LENGTH:
        assert result.tokens == expected
        assert result.text == to_bytes(expected).decode()
    pieces = list(handle)
    assert sum((piece.tokens for piece in pieces), ()) == result.tokens
    assert "".join(piece.text for piece in pieces) == result.text
    assert result.prompt_tokens == len(handle.request.prompt)
    if handle.request.logprobs:
        assert sum((piece.logprobs for piece in pieces), ()) == result.logprobs
        assert len(result.logprobs) == len(result.tokens)
        assert max(result.logprobs, default=0) <= 0


def stays_within(ours):
    """Whether the next chunk of every slot has room in the caches."""
    state = ours._device._state
    return np.asarray(state.lengths).max() + CHUNK <= jax.tree.leaves(state.caches)[0].shape[1]


def test_random_traffic():
    """Random arrivals, lengths, settings and cancellations; nothing is compiled after the
    warm-up, even one under a mesh, which the engine's own thread is not.
    """
    ours = engine()
    rng = np.random.default_rng(1)
    handles = []
    cancelled = set()
    # jax 0.11 tells no mesh from one that was set and reset
    is_set = jax.__version_info__ >= (0, 12)
    around = jax.set_mesh(parallel.make_mesh()) if is_set else contextlib.nullcontext()
    with compilations.counted() as compiled, around:
        ours.warm_up()
    assert compiled
    waiting = list(requests(24))
    with compilations.counted() as compiled:
        while waiting or ours.busy:
            for _ in range(rng.integers(0, 4)):
                if waiting:
                    handles.append(ours.submit(waiting.pop()))
            if rng.random() < 0.3 and handles:
                handle = handles[rng.integers(len(handles))]
                if not handle.done:
                    cancelled.add(handle)
                handle.cancel()  # twice, or too late: nothing happens
            ours.step()
            assert stays_within(ours)
        assert not compiled
    assert len(handles) == 24
    assert 0 < len(cancelled) < 12
    for handle in handles:
        check(handle)
        assert handle.result().finish == ("cancelled" if handle in cancelled else "length")
    stats = ours.stats()
    assert (stats.queued, stats.running) == (0, 0)
    assert stats.finished == dict(
        stop=0, length=24 - len(cancelled), cancelled=len(cancelled), failed=0
    )
    assert stats.new_tokens == sum(len(handle.result().tokens) for handle in handles)


@pytest.mark.parametrize("chunk", [5, full(1), full(16)])
def test_a_request_may_fill_the_capacity(chunk):
    """Beside one that goes on, in a slot that was used before; the last chunk ends beyond the last
    token.
    """
    ours, tokens = engine(chunk=chunk), cases.tokens((4, 63))
    for prompt in (1, 32, 33, 63):
        length = CAPACITY - prompt
        prompts = [row[: max(1, prompt - i % 2)] for i, row in enumerate(tokens)]
        handles = [ours.submit(Request(one, max_new_tokens=length)) for one in prompts]
        for handle in handles:
            check(handle)
            assert len(handle.result().tokens) == length
        with refused(f"a prompt of {prompt} tokens and {length + 1} new ones need 65 positions"):
            ours.submit(Request(tokens[0][:prompt], max_new_tokens=length + 1))
    assert jax.tree.leaves(ours._device._state.caches)[0].shape[1] >= CAPACITY + chunk


def test_buckets():
    assert buckets(longest=1, positions=64) == (32,)
    assert buckets(longest=33, positions=64) == (32, 64)
    assert buckets(longest=1023, positions=1056) == (32, 64, 128, 256, 512, 1024)
    assert buckets(longest=1100, positions=1152)[-1] == 1152


def naive(data, stop):
    """The text up to the first stop string to be complete, by looking at every beginning of the
    text.
    """
    whole = data.decode("utf-8", errors="replace")
    for end in range(len(whole) + 1):
        found = [end - len(one) for one in stop if whole[:end].endswith(one)]
        if found:
            return whole[: min(found)], True
    return whole, False


def test_text_does_not_depend_on_how_its_bytes_are_cut():
    rng = np.random.default_rng(0)
    alphabets = [b"ab", "aé".encode(), "é😀".encode(), bytes(range(256)), b"\xe2\x82\xac\xf0a"]
    stops = [
        (),
        ("ab",),
        ("aab", "ab"),
        ("abab", "ba"),
        ("aé", "éa", "é😀"),
        ("aaaa", "bb", "abba"),
        ("\ufffd",),
    ]
    hits = 0
    for _ in range(3000):
        alphabet = alphabets[rng.integers(5)]
        stop = stops[rng.integers(7)]
        data = bytes(rng.choice(list(alphabet), rng.integers(0, 30)).tolist())
        ours = StopText(stop)
        shown = ""
        at = 0
        expected, stopped = naive(data, stop)
        while at < len(data):
            size = rng.integers(1, 6)
            shown += ours.push(data[at : at + size])
            at += size
            assert expected.startswith(shown)  # nothing that is shown is ever taken back
            # and of whole characters no more is held back than the beginning of a stop string
            held = codecs.getincrementaldecoder("utf-8")("replace").decode(data[:at])[len(shown) :]
            assert not held or ours.stopped or any(one.startswith(held) for one in stop)
        shown += ours.flush()
        assert (shown, ours.stopped) == (expected, stopped)
        hits += stopped
    assert 500 < hits < 2500


def test_stops_end_a_request_wherever_they_stand():
    """At every position of the text, so also across the ends of chunks. What is held back, as the
    beginning of a stop string of which the rest never came, comes at the end.
    """
    asked = dict(prompt=[5, 6, 7], max_new_tokens=18, temperature=1.5, seed=3)
    whole = alone(Request(**asked))
    ours = engine()
    shown = to_bytes(whole).decode()
    stops = [shown[start : start + 3] for start in range(len(shown) - 3)]
    by_text = [ours.submit(Request(**asked, stop=(stop, "nothing like it"))) for stop in stops]
    never = [f"{letter}?" for letter in set(shown)]
    by_token = [ours.submit(Request(**asked, stop_ids=(t, 250), stop=never)) for t in whole]
    ours.run()
    for handle, stop in zip(by_text, stops):
        result, at = handle.result(), shown.index(stop)
        assert (result.finish, result.text) == ("stop", shown[:at])
        assert "".join(piece.text for piece in handle) == result.text
        assert result.tokens == whole[: -(-(at + 3) // 2)]
    for handle, token in zip(by_token, whole):
        result, at = handle.result(), min(whole.index(one) for one in (token, 250) if one in whole)
        assert (result.finish, result.tokens) == ("stop", whole[: at + 1])
        assert result.text == to_bytes(whole[:at]).decode() == "".join(p.text for p in handle)


def test_a_full_queue():
    ours = engine(max_queue=2)
    first = [ours.submit(NINE) for _ in range(2)]
    with pytest.raises(QueueFull, match="no room for 1 more in the queue of 2 requests: 2 wait"):
        ours.submit(NINE)
    first[0].cancel()
    assert first[0].result() == decode.Result((), "", None, Finish.CANCELLED, 1)
    with pytest.raises(QueueFull, match="no room for 2 more in the queue of 2 requests: 1 wait"):
        ours.submit_all([Request([1], max_new_tokens=2)] * 2)
    assert ours.stats().queued == 1, "all or none"
    ours.submit(Request([1], max_new_tokens=2))
    ours.step()
    assert (ours.stats().queued, ours.stats().running) == (0, 1)


@pytest.mark.parametrize(
    "message, wrong",
    {
        "the prompt is empty": dict(prompt=[]),
        "prompt must be a list of whole numbers": dict(prompt=[1.7]),
        "top_k must be at most 2147483647": dict(top_k=2**31),
        "temperature must be at most 1e.30, not inf": dict(temperature=float("inf")),
        "stop_ids must be a list of whole numbers": dict(stop_ids=["x"]),
        "stop strings need a decoder": dict(stop="a"),
        "a stop string may have 1000 characters, not 1001": dict(stop=["a", "b" * 1001]),
    }.items(),
)
def test_impossible_requests(wrong, message):
    ours = engine(decoder=None)
    with refused(message):
        ours.submit(Request(**{"prompt": [1], "max_new_tokens": 3, **wrong}))
    assert not ours.busy


def test_numbers_of_other_kinds():
    asked = Request(
        np.array([3, 1]),
        max_new_tokens=np.int64(4),
        temperature=np.float32(0.5),
        top_p=1,
        seed=np.uint8(7),
    )
    assert asked == Request((3, 1), max_new_tokens=4, temperature=0.5, top_p=1.0, seed=7)
    assert type(asked.prompt[0]) is type(asked.seed) is int
    assert type(asked.temperature) is float


def test_an_engine_larger_than_the_memory():
    with refused(r"a cache of 3 x 500,000,000 tokens needs .* GiB a device .weights 0.0, cache"):
        engine(capacity=500_000_000)
    with refused("a cache of 3 x 1,000,000,000,000,000 tokens needs"):
        engine(capacity=10**15)


def test_an_engine_is_one_replica():
    with refused("mesh.data x mesh.fsdp must be 1, not 2"):
        Engine(*parts(data=2, tensor=4))
    odd = dict(prefill_chunk=1, interleave=2)
    for wrong in (dict(slots=0), dict(capacity=1), dict(max_queue=0), dict(chunk=0), odd):
        name = next(iter(wrong))
        with refused(f"{name} must be at least"):
            engine(**wrong)


def test_requests_from_many_threads():
    with engine(max_queue=30) as ours, futures.ThreadPoolExecutor(8) as clients:
        with refused("runs already"):
            ours.start()

        def answered(request):
            handle = ours.submit(request)
            handle.result(timeout=300)
            return handle

        handles = list(clients.map(answered, requests(30, seed=5)))
    assert ours.stats().finished["length"] == 30
    for handle in handles:
        check(handle)


def test_stopping_cancels_and_the_engine_can_be_started_again():
    ours = engine()
    with ours:
        handles = [ours.submit(Request([3], max_new_tokens=60)) for _ in range(15)]
        next(iter(handles[0]))
        with pytest.raises(TimeoutError):
            handles[-1].result(timeout=0)
    reasons = [handle.result().finish for handle in handles]
    assert reasons[-1] == "cancelled"
    assert not ours.threaded
    check(handles[0])
    with ours:
        again = ours.submit(handles[-1].request)
        assert again.result(timeout=300).finish is Finish.LENGTH
    check(again)
    ours.stop()


@pytest.mark.parametrize("threaded", [True, False])
def test_an_error_reaches_everyone_who_waits(threaded, monkeypatch):
    ours = engine(slots=1)
    handles = [ours.submit(NINE) for _ in range(3)]

    def broken(choice):
        raise MemoryError("no more of it")

    monkeypatch.setattr(ours._device, "decode", broken)
    if threaded:
        ours.start()
    for handle in handles:
        with pytest.raises(MemoryError, match="no more of it"):
            handle.result(timeout=300)
        with pytest.raises(MemoryError):
            list(handle)
    for use in (ours.step, ours.start, lambda: ours.submit(NINE)):
        with pytest.raises(RuntimeError, match="the engine ended with an error: MemoryError"):
            use()
    assert isinstance(ours.error, MemoryError)
    assert ours.stats().finished["failed"] == 3
    assert not ours.busy
    ours.stop()


def test_a_long_prompt_keeps_nobody_waiting():
    """It is read a block a round, while others decode; who is cancelled in the middle leaves the
    slot as it was.
    """
    ours = engine(prefill_chunk=8)
    ours.warm_up()
    short = Request([1, 2], max_new_tokens=60)
    long = Request(list(range(1, 41)), max_new_tokens=9)
    with compilations.counted() as compiled:
        ours.submit(long).result()
    assert not compiled
    running = ours.submit(short)
    ours.step()
    reading = ours.submit(long)
    dropped = ours.submit(long)
    pieces = iter(running)
    counts = []
    heard = []
    reading.subscribe(heard.append)
    next(pieces)
    for turn in range(1, 6):
        if turn == 3:
            dropped.cancel()
        ours.step()
        counts.append(len(next(pieces).tokens))
        assert bool(heard) == (turn == 5), "40 tokens are five blocks"
    assert counts == [CHUNK] * 5
    assert dropped.done
    assert dropped.result().tokens == ()
    ours.submit(long)
    ours.run()
    assert reading.result().tokens == alone(long)
    assert running.result().tokens == alone(short)


def test_whoever_subscribes_hears_everything_once():
    """Before the first piece, between two, and after the end; of a cancelled request the end,
    too.
    """
    ours = engine()
    heard = ([], [], [])
    handle = ours.submit(Request([1], max_new_tokens=12))
    handle.subscribe(heard[0].append)
    ours.step()
    assert len(heard[0]) == 2
    handle.subscribe(heard[1].append)
    ours.run()
    handle.subscribe(heard[2].append)
    assert heard[0] == heard[1] == heard[2] == [*handle, handle.result()]
    cancelled = ours.submit(Request([1], max_new_tokens=12))
    heard = []
    cancelled.subscribe(heard.append)
    cancelled.cancel()
    assert heard == [cancelled.result()]
