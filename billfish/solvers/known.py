"""What a solver can use of a layer's statistics."""

from dataclasses import dataclass

import torch
from torch import Tensor

from billfish.solvers import gptq
from billfish.solvers.methods import Method
from billfish.solvers.statistics import Statistics


@dataclass(frozen=True)
class Known:
    """Calibration results that a solver can use; without a Hessian it rounds to nearest, without a
    factor it has no error feedback."""

    hessian: Tensor | None = None
    factor: gptq.Factor | None = None
    drift: Tensor | None = None
    note: str | None = None

    @staticmethod
    def of(statistics: Statistics | None, method: Method, order: Tensor | None = None) -> "Known":
        """`order`: of the columns in the factor, if not by decreasing diagonal of H."""
        if not method.needs_data:
            return Known(statistics.hessian if statistics and statistics.tokens else None)
        if statistics is None or not statistics.tokens:
            return Known(note="saw no calibration token: rounded to nearest")
        hessian = statistics.hessian
        if not method.error_feedback:
            if bool(torch.isfinite(hessian).all()):
                return Known(hessian)
            return Known(note="calibration inputs are not finite: rounded to nearest")
        factor = gptq.Factor.of(hessian, order=order)
        if factor is None:
            return Known(note="Hessian not positive definite at any damping: rounded to nearest")
        return Known(hessian, factor, statistics.drift, factor.note)

    def target(self, weight: Tensor) -> Tensor:
        """The weight to round."""
        if self.factor is None or self.drift is None:
            return weight
        return gptq.undrift(weight, self.factor, self.drift)
