"""AdamW, or Muon for matrices, with clipping by global norm and a guard that skips outlier steps; for optax.

The rules are those of OLMo-core's SkipStepAdamW (optim/adamw.py, optim/skip_step_optimizer.py) and of its trainer's
gradient clipping. A step whose loss or gradient norm lies more than `sigma` deviations above the recent mean changes
neither weights, moments nor the Adam count; the learning-rate schedule and the windows move on.

Two deliberate differences, both about numbers that the reference lets through:
- A step whose loss or gradient norm is not finite is always skipped (also while the guard is not active yet, and by the
  kinds that skip no outliers), and the value is left out of the statistics. The reference multiplies by a step factor
  of 0, and 0 * NaN poisons the moments.
- A deviation needs two earlier values. The reference divides by zero when the guard is active after one (window < 6).
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax

from maxtext.config.optimizer import OptimConfig
from maxtext.config.schema import Config
from maxtext.model.matrices import Matrices
from maxtext.parallel.host_memory import back, lies_on_host, to_device
from maxtext.parallel.isolated import in_blocks, isolated
from maxtext.train.moments import stored
from maxtext.train.muon import orthogonalized

PyTree = Any
Windows = tuple[jax.Array | None, jax.Array | None]  # of losses and gradient norms; None: no step is skipped


class OptimizerState(NamedTuple):
    """State of the optimizer; moments have the shape, sharding and names of the weights, all else is replicated."""

    count: jax.Array  # int32: updates made, without skipped ones; the t of Adam's bias correction
    mu: PyTree  # optim.moments_dtype: first moment, of Muon the momentum
    nu: PyTree  # optim.moments_dtype: second moment; None for what Muon updates
    learning_rate: jax.Array  # float32: rate of the last step
    n_recorded: jax.Array  # int32: all steps, with skipped ones; the t of the learning-rate schedule
    skipped: jax.Array  # int32: 1 when the last step was skipped, as an outlier or because it was not finite
    loss_window: jax.Array | None  # float32 (window,): ring buffer, the value of step t at (t - 1) mod window
    grad_norm_window: jax.Array | None  # the same of the gradient norm before clipping; both None if outliers are taken


class OptimNumbers(NamedTuple):
    """The numbers of the optimizer, made in float64; a sweep traces them, as it has other ones for each member."""

    beta2: float | jax.Array
    rest1: float | jax.Array  # 1 - beta1
    rest2: float | jax.Array
    log1: float | jax.Array  # the logarithm of beta1
    log2: float | jax.Array
    eps: float | jax.Array
    weight_decay: float | jax.Array
    max_grad_norm: float | jax.Array  # infinite: gradients are not scaled
    sigma: float | jax.Array
    momentum: float | jax.Array  # of Muon
    momentum_rest: float | jax.Array
    matrix_rate: float | jax.Array  # learning rate of matrices over that of AdamW
    matrix_decay: float | jax.Array


def optim_numbers(cfg: Config) -> OptimNumbers:
    """The numbers of `cfg.optim`. Raises ValueError for betas that are 1."""
    optim, muon = cfg.optim, cfg.optim.muon
    b1, b2 = optim.betas
    if not (b1 < 1 and b2 < 1):
        raise ValueError(f"optim.betas is [{b1}, {b2}], but both must be below 1; the usual value is [0.9, 0.95]")
    log1, log2 = (math.log(beta) if beta else -math.inf for beta in (b1, b2))
    return OptimNumbers(
        b2, 1 - b1, 1 - b2, log1, log2, optim.eps, optim.weight_decay,
        math.inf if optim.max_grad_norm is None else optim.max_grad_norm, optim.skip.sigma,
        muon.momentum, 1 - muon.momentum, 1.0 if muon.matrix_lr is None else muon.matrix_lr / optim.lr,
        optim.weight_decay if muon.matrix_weight_decay is None else muon.matrix_weight_decay)


def global_norm(tree: PyTree) -> jax.Array:
    """L2 norm over all entries of all leaves, as a float32 scalar."""
    return jnp.sqrt(sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)), jnp.float32(0)))


def decay_mask_from_names(names: PyTree, patterns: Sequence[str]) -> PyTree:
    """Return a tree of bool like `names` (dotted parameter names): False where a glob pattern matches the whole name.

    Raises ValueError for a pattern that matches no name, since the decay that it should stop would go on unnoticed.
    """
    all_names = jax.tree.leaves(names)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in all_names):
            near = difflib.get_close_matches(pattern, all_names, n=3, cutoff=0.4) or sorted(all_names)[:5]
            raise ValueError(f"optim.no_decay: {pattern!r} matches no parameter; names are dotted, such as "
                             f"{', '.join(near)} (globs: * ? [])")
    return jax.tree.map(lambda name: not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns), names)


def make_optimizer(cfg: Config, schedule: Callable[[jax.Array], jax.Array], decay_mask: PyTree,
                   matrices: Sequence[Matrices | None] = (), numbers: OptimNumbers | None = None
                   ) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of `cfg.optim`.

    Its `update(grads, state, params, *, loss, grad_norm)` takes gradients that are not clipped yet, their global norm
    and the cross-entropy (without z-loss) of the whole global batch. `schedule(t)` gives the rate of step t = 1, 2, ...
    and `decay_mask` is a tree of Python bool like the weights. `matrices` says for each leaf of the weights what Muon
    orthogonalises; AdamW updates the others, and all with a kind without Muon. Everything is computed in float32 on the
    devices; moments that lie in the host's memory return there. With determinism any_mesh it is compiled alike on every
    mesh. `numbers` stand in place of those of `cfg`.

    When weights and state are donated, return them from the step in the order of its arguments: jax pairs donated
    buffers with outputs of the same shape in order, and XLA copies every moment several times when they are crossed.
    """
    optim = cfg.optim
    given = optim_numbers(cfg) if numbers is None else numbers
    window, fixed = optim.skip.window if optim.skips else None, cfg.train.determinism == "any_mesh"

    def by_muon(leaves: Sequence[Any]) -> list[Matrices | None]:
        assert not optim.uses_muon or len(matrices) == len(leaves), "Muon needs to know the matrices of every leaf"
        return list(matrices) if optim.uses_muon else [None] * len(leaves)

    def init(params: PyTree) -> OptimizerState:
        leaves, treedef = jax.tree.flatten(params)

        def moments(wanted: Sequence[bool]) -> PyTree:
            return treedef.unflatten([jnp.zeros_like(p, dtype=optim.moments_dtype) if want else None
                                      for p, want in zip(leaves, wanted, strict=True)])

        def values(shape: tuple[int, ...] = (), dtype: Any = jnp.float32) -> jax.Array:
            return jnp.zeros(shape, dtype)  # a new array for each field: donated buffers must not be shared

        return OptimizerState(
            count=values(dtype=jnp.int32), mu=moments([True] * len(leaves)),
            nu=moments([how is None for how in by_muon(leaves)]), learning_rate=values(),
            n_recorded=values(dtype=jnp.int32), skipped=values(dtype=jnp.int32),
            loss_window=None if window is None else values((window,)),
            grad_norm_window=None if window is None else values((window,)))

    def shared(count: jax.Array, n_recorded: jax.Array, windows: Windows, loss: jax.Array,
               grad_norm: jax.Array) -> tuple[_Common, Windows]:
        losses, norms = windows
        if losses is None or norms is None:
            take = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        else:
            take = (_is_ordinary(loss, losses, n_recorded, given.sigma)
                    & _is_ordinary(grad_norm, norms, n_recorded, given.sigma))
            windows = _record(losses, n_recorded, loss), _record(norms, n_recorded, grad_norm)
        off = isinstance(given.max_grad_norm, float) and math.isinf(given.max_grad_norm)
        clip = 1.0 if off else jnp.minimum(1.0, given.max_grad_norm / (grad_norm + 1e-6))
        t = (count + 1 if optim.step_increment_bugfix else jnp.ones_like(count)).astype(jnp.float32)
        return _Common(optim, schedule(n_recorded + 1), clip, take, t, n_recorded), windows

    def adamw(common: _Common, leaf: _Leaf, runs: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        change, m, v = (in_blocks(functools.partial(_adamw, given, leaf.decays), runs, cfg.virtual_shards, common,
                                  leaf.p, leaf.g, leaf.m, leaf.v) if fixed else
                        _adamw(given, leaf.decays, common, leaf.p, leaf.g, leaf.m, leaf.v))
        return change, common.stored(m, leaf, 0), common.stored(v, leaf, 1)

    def update(grads: PyTree, state: OptimizerState, params: PyTree | None = None, *, loss: jax.Array,
               grad_norm: jax.Array, **_: Any) -> tuple[PyTree, OptimizerState]:
        assert params is not None, "the optimizer needs the weights"
        runs = state.n_recorded >= 0  # always
        windows = state.loss_window, state.grad_norm_window
        seen = state.count, state.n_recorded, windows, loss, grad_norm
        common, windows = isolated(shared, runs, *seen) if fixed else shared(*seen)

        leaves, treedef = jax.tree.flatten(params)
        decays = jax.tree.leaves(decay_mask)
        assert len(decays) == len(leaves), "decay_mask must be a tree of bool like the weights"
        columns = (treedef.flatten_up_to(x) for x in (grads, state.mu, state.nu))
        rows = [_Leaf(*row) for row in zip(range(len(leaves)), decays, leaves, *columns, strict=True)]
        orthogonal = [(_fetched(row, [grad_norm]), how) for row, how in zip(rows, by_muon(leaves), strict=True) if how]
        results = _muon(given, common, orthogonal) if orthogonal else {}
        done = [grad_norm]  # nothing sets out before all gradients are there
        for row in rows:
            if row.index not in results:
                change, m, v = adamw(common, _fetched(row, done[-1:]), runs)
                results[row.index] = change, back(m, row.m), back(v, row.v)
                done.append(results[row.index][1])
        changes, mu, nu = (treedef.unflatten(column) for column in
                           zip(*(results[row.index] for row in rows), strict=True))
        taken = common.take.astype(jnp.int32)
        return changes, OptimizerState(
            count=state.count + (taken if optim.step_increment_bugfix else 0), mu=back(mu, state.mu),
            nu=back(nu, state.nu), learning_rate=common.rate,
            n_recorded=state.n_recorded + 1, skipped=1 - taken, loss_window=windows[0],
            grad_norm_window=windows[1])

    # optax's types know no state that is a NamedTuple and no required keyword.
    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


class _Leaf(NamedTuple):
    """One array of the weights, and what belongs to it."""

    index: int
    decays: bool
    p: jax.Array
    g: jax.Array
    m: jax.Array
    v: jax.Array | None


def _fetched(leaf: _Leaf, after: list[jax.Array]) -> _Leaf:
    """The leaf with weights and moments on the devices; what lies on the host sets out when `after` has been computed.

    So few of them are on the devices at one time; left to itself the compiler fetches all of them at once.
    """
    if not lies_on_host(leaf.m) and not lies_on_host(leaf.p):
        return leaf
    p, m, v, *_ = jax.lax.optimization_barrier((leaf.p, leaf.m, leaf.v, *after))
    return leaf._replace(p=to_device(p), m=to_device(m), v=to_device(v))


@flax.struct.dataclass
class _Common:
    """What all arrays share in one step."""

    optim: OptimConfig = flax.struct.field(pytree_node=False)
    rate: jax.Array
    clip: jax.Array | float  # the gradients' factor
    take: jax.Array  # bool scalar; False: the step is skipped
    t: jax.Array  # float32: of the bias correction
    step: jax.Array  # int32: steps before this one

    def clipped(self, g: jax.Array) -> jax.Array:
        return g.astype(jnp.float32) * self.clip

    def unless_skipped(self, new: jax.Array, old: jax.Array | float = -0.0) -> jax.Array:
        """The new value, or the old one: by a select, not a factor, because NaN * 0 is NaN.

        -0.0 is the number that changes no bit of what it is added to, not even of a -0.0.
        """
        return jnp.where(self.take, new, old)

    def stored(self, moment: jax.Array, leaf: _Leaf, which: int) -> jax.Array:
        return stored(moment, self.optim.moments_dtype, self.step, 2 * leaf.index + which)


def _adamw(given: OptimNumbers, decays: bool, common: _Common, p: jax.Array, g: jax.Array, m: jax.Array,
           v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The change of one array, and its new moments, float32."""
    g, m, v = common.clipped(g), m.astype(jnp.float32), v.astype(jnp.float32)
    new_m = common.unless_skipped(m + given.rest1 * (g - m), m)
    new_v = common.unless_skipped(given.beta2 * v + given.rest2 * (g * g), v)
    correction1, correction2 = _bias_correction(given.log1, common.t), jnp.sqrt(_bias_correction(given.log2, common.t))
    change = (-common.rate / correction1) * new_m / (jnp.sqrt(new_v) / correction2 + given.eps)
    if decays and _counts(given.weight_decay):
        change -= (common.rate * given.weight_decay) * p  # before the Adam update, so of the old weight
    return common.unless_skipped(change), new_m, new_v


def _muon(given: OptimNumbers, common: _Common, leaves: Sequence[tuple[_Leaf, Matrices]]
          ) -> dict[int, tuple[jax.Array, jax.Array, None]]:
    """The change of each array made of matrices, and its new momentum."""
    muon = common.optim.muon
    rate = common.rate * given.matrix_rate
    momenta, heading = [], []
    for leaf, _ in leaves:
        g, m = common.clipped(leaf.g), leaf.m.astype(jnp.float32)
        new_m = m + given.momentum_rest * (g - m)
        heading.append(g + given.momentum * (new_m - g) if muon.nesterov else new_m)
        momenta.append(common.stored(common.unless_skipped(new_m, m), leaf, 0))
    results = {}
    directions = orthogonalized(heading, [how for _, how in leaves], muon)
    for (leaf, _), direction, momentum in zip(leaves, directions, momenta, strict=True):
        change = -rate * direction
        if leaf.decays and _counts(given.matrix_decay):
            change -= (rate * given.matrix_decay) * leaf.p
        results[leaf.index] = common.unless_skipped(change), momentum, None
    return results


def _counts(factor: float | jax.Array) -> bool:
    """Whether a term with this factor is computed: not if it is known to be 0."""
    return not (isinstance(factor, int | float) and factor == 0)


def _bias_correction(log_beta: float | jax.Array, t: jax.Array) -> jax.Array:
    """1 - beta^t, without the cancellation of the literal form for small t and beta near 1; 1 for a beta of 0."""
    return -jnp.expm1(t * log_beta)


def _is_ordinary(value: jax.Array, window: jax.Array, n_recorded: jax.Array,
                 sigma: float | jax.Array) -> jax.Array:
    """Whether `value` is no upward outlier against the earlier values in `window` (bool scalar)."""
    valid = (jnp.arange(window.size) < n_recorded) & jnp.isfinite(window)
    n = jnp.sum(valid).astype(jnp.float32)
    mean = jnp.sum(jnp.where(valid, window, 0)) / jnp.maximum(n, 1)
    variance = jnp.sum(jnp.where(valid, window - mean, 0) ** 2) / jnp.maximum(n - 1, 1)  # unbiased, as torch.std
    active = (n_recorded + 1 >= max(2, window.size // 2)) & (n >= 2)
    return jnp.isfinite(value) & (~active | (value - mean <= sigma * jnp.sqrt(variance)))


def _record(window: jax.Array, n_recorded: jax.Array, value: jax.Array) -> jax.Array:
    """Write `value` over the oldest entry; a skipped step's value stays too, as in the reference."""
    return jnp.where(jnp.arange(window.size) == n_recorded % window.size, value.astype(jnp.float32), window)
