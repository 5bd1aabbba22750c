"""The text of a completion while it is written: what is given out early, and where a stop cuts it."""

import codecs
import string
from itertools import accumulate, count

import pytest
from engines import check_at_rest, joined, make_engine
from engines import quick_compilation as quick_compilation
from hypothesis import given
from hypothesis import strategies as st
from tiny import greedy, random_prompts, tiny_llama

from paged_jax.engine import SamplingParams
from paged_jax.engine.text import TextWriter

# Token ids and their bytes: letters, words, an empty one, and the parts of "é" and "€".
PIECES = [b"a", b"b", b"c", b"ab", b"bca", b"", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac"]


class Stream:
    """Bytes to text, as soon as a character is complete."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(PIECES[token_id])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def tokens_of(text: str) -> list[int]:
    """One letter a token."""
    return ["abc".index(letter) for letter in text]


def write(token_ids, stops, sizes=(), has_text=True) -> tuple[int, str, bool, list[str]]:
    """Pushes so many tokens at a time, at last one: tokens read, text, whether stopped, pieces given."""
    writer = TextWriter(Stream() if has_text else None, stops)
    rest, pieces, read, stopped = list(token_ids), [], 0, False
    sizes = list(sizes)
    while rest and not stopped:
        size = sizes.pop(0) if sizes else 1
        count, piece, stopped = writer.push(rest[:size])
        assert stopped or count == len(rest[:size])
        rest, read = rest[size:], read + count
        pieces.append(piece)
    if not stopped:
        piece, stopped = writer.finish()
        pieces.append(piece)
    assert writer.text == "".join(pieces)
    return read, writer.text, stopped, pieces


def expected(token_ids, stops) -> tuple[int, str, bool]:
    """The same from whole texts: after each token, does any stop end there, and where did it begin?"""
    stream = Stream()
    texts = [stream.push(token) for token in token_ids]
    begins = [0, *accumulate(len(text) for text in texts)]
    for read in range(1, len(token_ids) + 1):
        text, known = "".join(texts[:read]), list(token_ids[:read])
        found = [text.find(stop) for stop in stops if isinstance(stop, str) and stop in text]
        found += [
            begins[read - len(stop)]
            for stop in stops
            if not isinstance(stop, str) and tuple(known[-len(stop) :]) == stop
        ]
        if found:
            return read, text[: min(found)], True
    text = "".join(texts) + stream.flush()
    found = [text.find(stop) for stop in stops if isinstance(stop, str) and stop in text]
    return len(token_ids), text[: min(found, default=None)], bool(found)


tokens = st.lists(st.integers(0, len(PIECES) - 1), max_size=12)
stop_lists = st.lists(
    st.one_of(
        st.text("abcé€\N{REPLACEMENT CHARACTER}", min_size=1, max_size=4),
        st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=3).map(tuple),
    ),
    max_size=3,
)


@given(tokens, stop_lists, st.lists(st.integers(1, 5), max_size=6))
def test_equals_a_search_in_the_whole_text(token_ids, stops, sizes):
    read, text, stopped, _ = write(token_ids, stops, sizes)
    assert (read, text, stopped) == expected(token_ids, stops)


@given(tokens, stop_lists, st.lists(st.integers(1, 5), max_size=6))
def test_sequences_need_no_text(token_ids, stops, sizes):
    sequences = [stop for stop in stops if not isinstance(stop, str)]
    read, _, stopped = expected(token_ids, sequences)
    assert write(token_ids, sequences, sizes, has_text=False)[:3] == (read, "", stopped)


@pytest.mark.parametrize(
    ("text", "stops", "pieces"),
    [
        ("abcab", [], ["a", "b", "c", "a", "b", ""]),
        ("abcab", ["ca"], ["a", "b", "", ""]),  # "c" may begin the stop, and does
        ("abcbb", ["ca"], ["a", "b", "", "cb", "b", ""]),  # and does not
        ("ababc", ["abc"], ["", "", "ab", "", ""]),
        ("aab", ["ab"], ["", "a", ""]),
        ("abcab", ["b", "abc"], ["", "a"]),  # the first to be completed
        ("abc", ["abca"], ["", "", "", "abc"]),  # the rest at the end
        ("abcab", [(2, 0)], ["a", "b", "", ""]),
        ("abcbb", [(2, 0)], ["a", "b", "", "cb", "b", ""]),
        ("ccca", [(2, 0)], ["", "c", "c", ""]),
        ("abcab", [(0,)], [""]),
        ("bcab", ["cab", (2, 0)], ["b", "", ""]),
    ],
    ids=str,
)
def test_what_may_belong_to_a_stop_is_kept_back(text, stops, pieces):
    assert write(tokens_of(text), stops)[3] == pieces


def test_b67_a_stop_of_two_texts_within_one_token_cuts_at_the_one_that_begins_first():
    read, text, stopped, pieces = write([0, 4, 0], ["ca", "bc"])
    assert (read, text, stopped, pieces) == (2, "a", True, ["a", ""])


def test_b67_tokens_of_one_push_after_the_stop_are_not_read():
    writer = TextWriter(Stream(), [(1, 2)])
    assert writer.push([0, 1]) == (2, "a", False)
    assert writer.push([2, 0, 0]) == (1, "", True)
    assert writer.text == "a"


def test_a_character_that_is_never_completed_comes_at_the_end():
    assert write([0, 8], [])[3] == ["a", "", "\N{REPLACEMENT CHARACTER}"]
    assert write([0, 8, 9, 6, 7], [])[1] == "a€é"


LETTERS = string.ascii_letters + string.digits + "+/"  # one for each token of the tiny model
NEW = 20
PROMPT = random_prompts(9, seed=5)[0]


class Letters:
    """As much of a tokenizer as an engine needs."""

    def __init__(self, eos_token_ids: tuple[int, ...] = ()):
        self.eos_token_ids = eos_token_ids

    def encode(self, text: str) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def stream(self) -> "Letters":
        return self

    def push(self, token_id: int) -> str:
        return LETTERS[token_id]

    def flush(self) -> str:
        return ""


def letters(token_ids) -> str:
    return "".join(LETTERS[token] for token in token_ids)


def written() -> tuple[int, ...]:
    return greedy(tiny_llama(), PROMPT, NEW)


def continue_prompt(engine, **settings):
    (output,) = engine.generate([letters(PROMPT)], SamplingParams(max_tokens=NEW, **settings))
    check_at_rest(engine)
    return output.completions[0]


class TestEngine:
    def test_text_in_and_out(self):
        engine = make_engine(tokenizer=Letters())
        completion = continue_prompt(engine)
        assert completion.token_ids == written()
        assert completion.text == letters(written())
        assert engine.generate([PROMPT], SamplingParams(max_tokens=NEW))[0].text == completion.text
        with pytest.raises(ValueError, match=r"one or more token ids in \[0, 64\), got \[\]"):
            engine.submit("")

    def test_after_an_error_in_the_tokenizer_no_text_comes_twice(self, monkeypatch):
        engine = make_engine(tokenizer=Letters())
        push, calls = Letters.push, count()

        def fail_once(stream, token_id):
            if next(calls) == 7:
                raise RuntimeError("not now")
            return push(stream, token_id)

        monkeypatch.setattr(Letters, "push", fail_once)
        request_id = engine.submit(PROMPT, SamplingParams(max_tokens=NEW, logprobs=True))
        deltas, errors = [], []
        while engine.has_work:
            try:
                deltas += engine.step()
            except RuntimeError as error:
                errors.append(error)
        assert len(errors) == 1
        assert joined(deltas) == written()
        assert "".join(delta.text for delta in deltas) == letters(written())
        assert sum(len(delta.logprobs) for delta in deltas) == NEW
        assert {delta.request_id for delta in deltas} == {request_id}
        check_at_rest(engine)

    @pytest.mark.parametrize("begin", [0, 1, 6, NEW - 2])
    def test_b67_a_stop_text_is_cut_exactly(self, begin):
        text = letters(written())
        stop = text[begin : begin + 2]
        engine = make_engine(tokenizer=Letters())
        end = text.index(stop) + 2
        completion = continue_prompt(engine, stop=(stop,), logprobs=True)
        assert completion.text == text[: end - 2]
        assert completion.token_ids == written()[:end]
        assert len(completion.logprobs) == end
        assert completion.finish_reason == "stop"
        assert engine.metrics.pages_cached <= (len(PROMPT) + end) // 4

    def test_b67_deltas_never_show_what_a_stop_takes_back(self):
        text = letters(written())
        engine = make_engine(tokenizer=Letters())
        stop = text[5:9]
        deltas = list(engine.stream(PROMPT, SamplingParams(max_tokens=NEW, stop=(stop,))))
        assert "".join(delta.text for delta in deltas) == text[: text.index(stop)]
        assert sum(len(delta.token_ids) for delta in deltas) == text.index(stop) + 4

    @pytest.mark.parametrize("place", [0, 6, NEW - 1])
    def test_b67_the_tokenizers_own_end(self, place):
        """The end token is written, but not in the text; `ignore_eos` goes on after it."""
        token = written()[place]
        end = written().index(token) + 1
        engine = make_engine(tokenizer=Letters(eos_token_ids=(token,)))
        completion = continue_prompt(engine)
        assert completion.token_ids == written()[:end]
        assert completion.text == letters(written()[: end - 1])
        assert completion.finish_reason == "stop"
        completion = continue_prompt(engine, ignore_eos=True)
        assert (completion.token_ids, completion.finish_reason) == (written(), "length")

    def test_an_abort_gives_out_what_was_kept_back(self):
        engine = make_engine(tokenizer=Letters())
        stop = letters(written()[4:8])[:3] + "-"
        stream = engine.stream(PROMPT, SamplingParams(max_tokens=NEW, stop=(stop,)))
        first, second = next(stream), next(stream)
        assert first.text + second.text == letters(written()[:4])
        engine.abort(first.request_id)
        (last,) = stream
        assert (last.text, last.token_ids, last.finish_reason) == (letters(written()[4:5]), (), "abort")


def test_b67_a_sequence_that_an_end_token_completes():
    """The end token itself is never pushed: it has ended the row on the device."""
    a, b, end = 0, 1, 99
    for stops, text in ((((b, end),), "a"), (((b, end), (a, b, end)), ""), (((b, 98),), "ab")):
        writer = TextWriter(Stream(), stops)
        given = writer.push([a, b])[1]
        assert given + writer.finish(end_token=end)[0] == text == writer.text
