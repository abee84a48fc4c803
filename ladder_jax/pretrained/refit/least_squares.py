"""The statistics of a sublayer's inputs and outputs in float64, and the matrices that they give."""

import dataclasses

import numpy as np

from ladder_jax.errors import RunFailed


@dataclasses.dataclass
class Statistics:
    """Sums over tokens, in float64 on the host.

    Each batch is summed in float32 on the devices: an entry errs by at most n u sum |a| |b|, with n tokens a batch and
    u = 2^-24 (about sqrt(n) u of it, where the roundings' signs are random), however many batches there are. So is it
    with OutputStatistics.

    products: [R, D, 2D], of late with late and with whole inputs. energy: of the whole inputs. missing: [R], of what
    the late inputs lack. R is the number of ranks with inputs of their own.
    """

    products: np.ndarray
    energy: float
    missing: np.ndarray

    @classmethod
    def zero(cls, width: int) -> "Statistics":
        return cls(np.zeros((1, width, 2 * width)), 0.0, np.zeros(1))

    def add(self, products: np.ndarray, energy: np.ndarray, missing: np.ndarray) -> None:
        """Adds a batch's sums, of which `products` may have padded columns."""
        width = self.products.shape[1]
        self.products = _added(self.products, products[:, :, : 2 * width])
        self.energy += float(energy)
        self.missing = self.missing + np.asarray(missing, np.float64)[: len(self.products)]

    def matrices(self, parts: int, *, ridge: float) -> list[np.ndarray]:
        """M [D, D] for each of `parts` equal groups of ranks, or one for all where all ranks have the same input."""
        groups = self.products.reshape(min(parts, len(self.products)), -1, *self.products.shape[1:])
        prior = np.eye(self.products.shape[1])
        return [solve(products, prior=prior, ridge=ridge) for products in groups.sum(axis=1)]

    def share_missing(self, matrices: list[np.ndarray] | None = None) -> float:
        """The mean of |n(z) M - n(x)|^2 over that of |n(x)|^2, with each rank's M; without, of |n(z) - n(x)|^2."""
        if matrices is None:
            return float(self.missing.mean() / self.energy)
        grams, crosses = np.split(self.products, 2, axis=2)
        pairs = zip(grams, crosses, matrices, strict=True)
        return float(1 + np.mean([np.sum(m * (gram @ m - 2 * cross)) for gram, cross, m in pairs]) / self.energy)


@dataclasses.dataclass
class OutputStatistics:
    """Sums over tokens: h is what a sublayer's output projection reads (all ranks'), and e what its output lacks.

    products: [M, M + D], of h with h and with e. energy: of the outputs that are to be reached. missing: of e.
    """

    products: np.ndarray | float = 0.0
    energy: float = 0.0
    missing: float = 0.0

    def add(self, products: np.ndarray, energy: np.ndarray, missing: np.ndarray) -> None:
        """Adds a batch's sums."""
        self.products = _added(self.products, products)
        self.energy += float(energy)
        self.missing += float(missing)

    def change(self, *, ridge: float) -> np.ndarray:
        """What to add to the output projection [M, D]: argmin |h X - e|^2 + l |X|^2, with l as for `Statistics`."""
        inner, outer = self.products.shape
        return solve(self.products, prior=np.zeros((inner, outer - inner)), ridge=ridge)

    def share_missing(self, change: np.ndarray | None = None) -> float:
        """The mean of |e|^2 over that of the outputs to be reached; with a change, of |e - h X|^2."""
        if change is None:
            return self.missing / self.energy
        gram, cross = np.split(self.products, [len(self.products)], axis=1)
        return float(self.missing + np.sum(change * (gram @ change - 2 * cross))) / self.energy


def solve(products: np.ndarray, *, prior: np.ndarray, ridge: float) -> np.ndarray:
    """(G + l 1)^-1 (C + l P) of `products` [K, K + D] = (G, C) and `prior` P [K, D], with l = `ridge` * trace(G) / K.

    Raises RunFailed.
    """
    import scipy.linalg  # slow to import

    gram, cross = np.split(products, [len(products)], axis=1)
    penalty = ridge * np.trace(gram) / len(gram)
    gram, cross = np.array(gram, order="F"), np.array(cross + penalty * prior, order="F")  # which LAPACK overwrites
    gram[np.diag_indices_from(gram)] += penalty
    try:
        return scipy.linalg.solve(gram, cross, assume_a="pos", overwrite_a=True, overwrite_b=True)
    except (np.linalg.LinAlgError, ValueError) as error:  # ValueError: not finite
        raise RunFailed(f"no least squares: {error} (too small a ridge, {ridge:g}, or infinite activations)") from None


def _added(total: np.ndarray | float, more: np.ndarray) -> np.ndarray:
    """In float64, and in place where the shapes agree: of a large model it has gigabytes."""
    if np.shape(total) != more.shape:
        return total + np.asarray(more, np.float64)
    total += more
    return total


def folded(weight: np.ndarray, gain: np.ndarray, matrices: list[np.ndarray], *, axis: int) -> np.ndarray:
    """M diag(`gain`) `weight` [D, ...] in the weight's dtype. With several M, each is of an equal part along `axis`."""
    parts = np.split(weight.astype(np.float64), len(matrices), axis=axis)
    scaled = [gain.astype(np.float64)[:, None] * part.reshape(len(part), -1) for part in parts]
    products = [(m @ rows).reshape(part.shape) for m, rows, part in zip(matrices, scaled, parts, strict=True)]
    return np.concatenate(products, axis=axis).astype(weight.dtype)
