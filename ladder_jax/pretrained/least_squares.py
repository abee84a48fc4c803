"""The statistics of a sublayer's inputs and outputs in float64, and the matrices that they give."""

import dataclasses
import functools

import numpy as np

from ladder_jax.errors import RunFailed


@dataclasses.dataclass
class Statistics:
    """Sums over tokens, in float64 on the host, of what a projection reads, h, and of what it is to give.

    Each batch is summed in float32 on the devices: an entry errs by at most n u sum |a| |b|, with n tokens a batch and
    u = 2^-24 (about sqrt(n) u of it, where the roundings' signs are random), however many batches there are.

    prior: 1 for an input, whose `products` [R, D, 2D] are of h = n(z) with itself and with the whole input; R is the
    number of ranks with inputs of their own. 0 for an output, whose `products` [1, M, M + D] are of h with itself and
    with what the output lacks. energy: of what is to be reached. missing: [R], of what lacks of it.
    """

    prior: int
    products: np.ndarray | float = 0.0
    energy: float = 0.0
    missing: np.ndarray | float = 0.0

    def add(self, products: np.ndarray, energy: np.ndarray, missing: np.ndarray) -> None:
        """Adds a batch's sums. In place where the shapes agree: of a large model they have gigabytes."""
        if np.shape(self.products) == products.shape:
            self.products += products
        else:
            self.products = self.products + np.asarray(products, np.float64)
        self.energy += float(energy)
        self.missing = self.missing + np.asarray(missing, np.float64)

    def matrices(self, parts: int, *, ridge: float) -> list[np.ndarray]:
        """M [D, D], or X [M, D], for each of `parts` equal groups of ranks; one for all where all have the same input.

        argmin |h M - t|^2 + l |M - P|^2 = (G + l 1)^-1 (C + l P), where h^T [h, t] = (G, C) and P is 1 or 0.
        """
        groups = np.split(self.products, min(parts, len(self.products)))
        return [solve(functools.reduce(np.add, group), prior=self.prior, ridge=ridge) for group in groups]

    def share_missing(self, matrices: list[np.ndarray] | None = None) -> float:
        """The mean of |t - h P|^2 over the energy; with each rank's M, that of |t - h M|^2."""
        missing = np.mean(self.missing)
        if matrices is None:
            return float(missing / self.energy)
        changes = []
        for products, matrix in zip(self.products, matrices, strict=True):
            gram, cross = np.split(products, [len(products)], axis=1)
            changes.append(np.sum(matrix * (gram @ matrix - 2 * cross)))
        change = np.mean(changes)
        return float(1 + change / self.energy if self.prior else (missing + change) / self.energy)


def solve(products: np.ndarray, *, prior: int, ridge: float) -> np.ndarray:
    """(G + l 1)^-1 (C + l P) of `products` [K, K + D] = (G, C), with P = `prior` 1 and l = `ridge` * trace(G) / K.

    Raises RunFailed.
    """
    import scipy.linalg  # slow to import

    gram, cross = np.split(products, [len(products)], axis=1)
    penalty = ridge * np.trace(gram) / len(gram)
    pulled = cross + penalty * prior * np.eye(*cross.shape)
    gram, cross = np.array(gram, order="F"), np.array(pulled, order="F")  # which LAPACK overwrites
    gram[np.diag_indices_from(gram)] += penalty
    try:
        return scipy.linalg.solve(gram, cross, assume_a="pos", overwrite_a=True, overwrite_b=True)
    except (np.linalg.LinAlgError, ValueError) as error:  # ValueError: not finite
        raise RunFailed(f"no least squares: {error} (too small a ridge, {ridge:g}, or infinite activations)") from None


def folded(weight: np.ndarray, gain: np.ndarray, matrices: list[np.ndarray], *, axis: int) -> np.ndarray:
    """M diag(`gain`) `weight` [D, ...] in the weight's dtype. With several M, each is of an equal part along `axis`."""
    gain, products = gain.astype(np.float64)[:, None], []
    parts = np.split(weight.astype(np.float64), len(matrices), axis=axis)
    for matrix, part in zip(matrices, parts, strict=True):
        product = matrix @ (gain * part.reshape(len(part), -1))
        products.append(product.reshape(part.shape))
    return np.concatenate(products, axis=axis).astype(weight.dtype)
