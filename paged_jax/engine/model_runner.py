"""The device side of the engine: the model, the state, and the calls that change it."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from paged_jax.engine.metrics import Metrics
from paged_jax.engine.request import SamplingParams
from paged_jax.engine.request import Sequence as Job
from paged_jax.engine.scheduler import Admission
from paged_jax.engine.steps import (
    NO_TOKEN,
    EngineModel,
    EngineState,
    Form,
    Report,
    Settings,
    admit,
    create_rows,
    run,
    update,
)
from paged_jax.engine.text import TextWriter
from paged_jax.page_table import NO_PAGE
from paged_jax.sampling import Sampling

_LIST = 128  # page ids in one call of `update`
_SAMPLING: dict[str, Any] = {field.name: np.float32 for field in dataclasses.fields(Sampling)}
_SAMPLING |= {"top_k": np.int32, "seed": np.uint32}


class ModelRunner:
    """Owns the `EngineState`; whoever holds another reference to it loses it with the next call."""

    def __init__(
        self,
        model: EngineModel,
        metrics: Metrics,
        *,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_pages_per_row: int,
        num_stops: int,
        dtype: DTypeLike | None,
    ):
        self._sizes = (num_pages, page_size, max_rows, max_pages_per_row, num_stops)
        self._dtype = dtype
        self._metrics = metrics
        self._set_model(model)
        self.state = self._new_state()

    def _set_model(self, model: EngineModel) -> None:
        self._facts = self._facts_of(model)
        self._create_pages = model.create_pages
        self._window = model.sliding_window
        self._graph, self._parameters = nnx.split(model)

    def _facts_of(self, model: EngineModel) -> dict[str, Any]:
        """What the host, the state and the compiled programs rely on."""

        def kinds(tree: Any) -> list[tuple[Any, ...]]:
            return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]

        return {
            "vocabulary": model.vocab_size,
            "sliding window": model.sliding_window,
            "pages": kinds(jax.eval_shape(lambda: model.create_pages(1, self._sizes[1], self._dtype))),
            "parameters": kinds(nnx.state(model)),
        }

    def replace_model(self, model: EngineModel) -> None:
        """Other weights from now on.

        Raises:
            ValueError: if its vocabulary, window, pages or parameters are not those of the model so far.
        """
        facts = self._facts_of(model)
        if others := [name for name, fact in facts.items() if fact != self._facts[name]]:
            raise ValueError(
                "Engine: other weights must belong to the same architecture, and these have another kind of "
                f"{', '.join(others)}; make another engine"
            )
        self._set_model(model)

    def reset(self) -> None:
        """A new state: empty rows, free pages."""
        # The memory may not hold two, and an error that is on its way may still refer to the old one.
        self._delete_state()
        self.state = self._new_state()

    def _delete_state(self, keep: Sequence[Any] = ()) -> None:
        kept = {id(array) for array in keep}
        for array in jax.tree.leaves(self.state):
            if id(array) not in kept:
                array.delete()

    def _new_state(self) -> EngineState:
        num_pages, page_size, *_ = self._sizes
        return EngineState(create_rows(*self._sizes), self._create_pages(num_pages, page_size, self._dtype))

    def leaves(self) -> list[Any]:
        """Of the state, in the order that `restore` takes."""
        return jax.tree.leaves(self.state)

    def restore(self, leaves: Sequence[Any]) -> None:
        """Takes over the leaves of another runner's state.

        Raises:
            ValueError: if they do not have the shapes and dtypes of this one's.
        """
        own, structure = jax.tree.flatten(self.state)

        def kinds(arrays: Sequence[Any]) -> list[tuple[tuple[int, ...], np.dtype]]:
            return [(tuple(np.shape(array)), np.dtype(array.dtype)) for array in arrays]

        if kinds(own) != kinds(leaves):
            raise ValueError(
                "Engine: the snapshot comes from an engine with another model or other arguments"
            )
        # The memory may not hold two; and the new one will be donated, while the snapshot is the caller's.
        self._delete_state(keep=leaves)
        self.state = jax.tree.unflatten(structure, [jnp.array(leaf) for leaf in leaves])

    def admit(self, admission: Admission) -> None:
        sequence, parent = admission.sequence, admission.parent
        rows = self.state.rows
        page_ids = np.full(rows.table.max_pages_per_row, NO_PAGE, np.int32)
        page_ids[: len(admission.page_ids)] = admission.page_ids
        self._set_rows(
            self._call(
                admit,
                rows,
                np.int32(admission.row),
                _settings(sequence, rows.tokens.shape[1], rows.stop_tokens.shape[1]),
                page_ids,
                np.int32(admission.num_held),
                np.int32(NO_PAGE if parent is None or parent.row is None else parent.row),
            )
        )

    def update(
        self, *, pinned: Sequence[int] = (), released: Sequence[int] = (), unpinned: Sequence[int] = ()
    ) -> jax.Array:
        """Pins pages, then empties rows, then unpins pages. Returns the number of free pages."""
        nobody = np.zeros(self.state.rows.table.max_rows, bool)
        rows = nobody.copy()
        rows[list(released)] = True
        pins, unpins = _lists(pinned), _lists(unpinned)
        calls = [(ids, nobody, _lists(())[0]) for ids in pins[:-1]]
        calls += [(pins[-1], rows, unpins[0])]
        calls += [(_lists(())[0], nobody, ids) for ids in unpins[1:]]
        for arguments in calls:
            changed, num_free = self._call(update, self.state.rows, *arguments)
            self._set_rows(changed)
        return num_free

    def run(self, form: Form, num_tokens: dict[int, int], num_steps: int, leave_on_end: bool) -> Report:
        """Runs steps and waits for them. Returns the report, its arrays in numpy."""
        counts = np.zeros(self.state.rows.table.max_rows, np.int32)
        counts[list(num_tokens)] = list(num_tokens.values())
        self.state, report = self._call(
            run,
            self._graph,
            self._parameters,
            self.state,
            counts,
            np.int32(num_steps),
            np.bool_(leave_on_end),
            form=form,
            window=self._window,
        )
        return jax.device_get(report)

    def warm_up(self, forms: Sequence[Form]) -> Iterator[str]:
        """Compiles everything by running it on nothing, one thing after each name that it yields."""
        yield "rows"
        nobody = Job("", 0, 0, (0,), SamplingParams(), 0, "", 1, (), TextWriter(None, ()))
        # Behind the last row: rows that are running stay as they are.
        self.admit(Admission(nobody, self.state.rows.table.max_rows, 0, (), None))
        self.update()
        for form in forms:
            drafts = ", with drafts" if form.drafts else ""
            yield f"{form.size} rows" if form.decode else f"{form.size} tokens{drafts}"
            self.run(form, {}, 0, False)

    def _set_rows(self, rows: Any) -> None:
        self.state = EngineState(rows, self.state.pages)

    def _call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        before = function._cache_size()  # type: ignore[attr-defined]
        try:
            return function(*arguments, **options)
        finally:
            self._metrics.compiles += function._cache_size() - before  # type: ignore[attr-defined]


def _settings(sequence: Job, width: int, num_stops: int) -> Settings:
    params = sequence.params
    values = {**vars(params), "seed": sequence.seed}
    tokens, stops = np.zeros(width, np.int32), np.full(num_stops, NO_TOKEN, np.int32)
    tokens[: sequence.num_tokens] = sequence.tokens()
    stops[: len(sequence.stop_token_ids)] = sequence.stop_token_ids
    return Settings(
        tokens=tokens,
        num_tokens=np.int32(sequence.num_tokens),
        prompt_lens=np.int32(len(sequence.prompt_ids)),
        max_tokens=np.int32(sequence.max_tokens),
        sampling=Sampling(**{name: dtype(values[name]) for name, dtype in _SAMPLING.items()}),
        stop_tokens=stops,
        logprobs=np.bool_(params.logprobs),
    )


def _lists(page_ids: Sequence[int]) -> list[np.ndarray]:
    """At least one array of `_LIST` page ids, filled up with NO_PAGE."""
    lists = np.full((max(1, -(-len(page_ids) // _LIST)), _LIST), NO_PAGE, np.int32)
    lists.reshape(-1)[: len(page_ids)] = page_ids
    return list(lists)
