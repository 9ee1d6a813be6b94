"""This project's own attacks as Foolbox attacks; written by .ci/generate_host_stubs.py."""

from typing import Any

from torch import Tensor

from robust_ext.adapters.foolbox.native import NativeFixedEpsilonAttack as NativeFixedEpsilonAttack
from robust_ext.adapters.foolbox.native import NativeMinimizationAttack as NativeMinimizationAttack
from robust_ext.adapters.foolbox.native import NativeNormlessAttack as NativeNormlessAttack
from robust_ext.adapters.foolbox.objectives import WithObjective as WithObjective
from robust_ext.adapters.foolbox.objectives import with_objective as with_objective

def foolbox_classes(attack_class: Any) -> dict[str, Any]: ...

class BaseAutoProjectedGradientDescent(NativeFixedEpsilonAttack):
    """See :class:`robust_ext.attacks.apgd.APGD`."""

    def __init__(
        self,
        *,
        steps: int = 100,
        restarts: int = 1,
        loss: str = "ce",
        target_classes: int = 9,
        rho: float = 0.75,
        momentum: float = 0.75,
        random_start: bool = True,
        warm: bool = False,
        stop_early: bool = False,
        seed: int | None = None,
    ) -> None: ...

class LinfAutoProjectedGradientDescentAttack(BaseAutoProjectedGradientDescent):
    """See :class:`robust_ext.attacks.apgd.APGD`."""

LinfAPGD = LinfAutoProjectedGradientDescentAttack

class L2AutoProjectedGradientDescentAttack(BaseAutoProjectedGradientDescent):
    """See :class:`robust_ext.attacks.apgd.APGD`."""

L2APGD = L2AutoProjectedGradientDescentAttack

class L1AutoProjectedGradientDescentAttack(BaseAutoProjectedGradientDescent):
    """See :class:`robust_ext.attacks.apgd.APGD`."""

L1APGD = L1AutoProjectedGradientDescentAttack

class BaseRandomSearch(NativeFixedEpsilonAttack):
    """See :class:`robust_ext.attacks.random_search.RandomSearch`."""

    def __init__(
        self,
        *,
        points: int = 400,
        outer: str = "corners",
        outer_share: float = 0.5,
        seed: int | None = None,
    ) -> None: ...

class LinfRandomSearchAttack(BaseRandomSearch):
    """See :class:`robust_ext.attacks.random_search.RandomSearch`."""

class L2RandomSearchAttack(BaseRandomSearch):
    """See :class:`robust_ext.attacks.random_search.RandomSearch`."""

class L1RandomSearchAttack(BaseRandomSearch):
    """See :class:`robust_ext.attacks.random_search.RandomSearch`."""

class BaseObjectivePGD(NativeFixedEpsilonAttack):
    """See :class:`robust_ext.attacks.objective_pgd.ObjectivePGD`."""

    def __init__(
        self,
        *,
        objective: str = "ace",
        algorithm: str = "pgd",
        steps: int | None = None,
        abs_stepsize: float | None = None,
        rel_stepsize: float | None = None,
        random_start: bool | None = None,
        best: bool = False,
        projection: str = "nearest",
        seed: int | None = None,
    ) -> None: ...

class LinfObjectivePGDAttack(BaseObjectivePGD):
    """See :class:`robust_ext.attacks.objective_pgd.ObjectivePGD`."""

LinfObjectivePGD = LinfObjectivePGDAttack

class L2ObjectivePGDAttack(BaseObjectivePGD):
    """See :class:`robust_ext.attacks.objective_pgd.ObjectivePGD`."""

L2ObjectivePGD = L2ObjectivePGDAttack

class L1ObjectivePGDAttack(BaseObjectivePGD):
    """See :class:`robust_ext.attacks.objective_pgd.ObjectivePGD`."""

L1ObjectivePGD = L1ObjectivePGDAttack

class BaseCarliniWagner(NativeMinimizationAttack):
    """See :class:`robust_ext.attacks.carlini_linf.CarliniWagnerLinf`."""

    def __init__(
        self,
        *,
        steps: int = 200,
        stepsize: float = 0.01,
        initial_const: float = 1e-05,
        largest_const: float = 20.0,
        const_factor: float = 2.0,
        decrease_factor: float = 0.9,
        confidence: float = 0.0,
    ) -> None: ...

class LinfCarliniWagnerAttack(BaseCarliniWagner):
    """See :class:`robust_ext.attacks.carlini_linf.CarliniWagnerLinf`."""

class BaseBoundarySearch(NativeMinimizationAttack):
    """See :class:`robust_ext.attacks.linear_region.boundary.BoundarySearch`."""

    def __init__(
        self,
        *,
        budget: float = 5000.0,
        budget_unit: str = "passes",
        starts: tuple[str, ...] = ("descent", "boundary", "noise"),
        target_classes: int = 3,
        draws: int = 8,
        start_steps: int = 60,
        survivors: int = 4,
        hops: int = 1000,
        batch: int = 128,
        pool: Tensor | None = None,
        pool_labels: Tensor | None = None,
        seed: int | None = None,
    ) -> None: ...

class L2BoundarySearchAttack(BaseBoundarySearch):
    """See :class:`robust_ext.attacks.linear_region.boundary.BoundarySearch`."""

class LinfBoundarySearchAttack(BaseBoundarySearch):
    """See :class:`robust_ext.attacks.linear_region.boundary.BoundarySearch`."""

class L1BoundarySearchAttack(BaseBoundarySearch):
    """See :class:`robust_ext.attacks.linear_region.boundary.BoundarySearch`."""

class BaseLinearRegion(NativeMinimizationAttack):
    """See :class:`robust_ext.attacks.linear_region.attack.LinearRegion`."""

    def __init__(
        self,
        *,
        budget: float = 5000.0,
        budget_unit: str = "passes",
        starts: tuple[str, ...] = ("descent", "boundary", "noise"),
        target_classes: int = 3,
        draws: int = 8,
        start_steps: int = 60,
        survivors: int = 4,
        hops: int = 1000,
        batch: int = 128,
        pool: Tensor | None = None,
        pool_labels: Tensor | None = None,
        regions: int = 1000,
        q: float = 0.8,
        gamma: float = 6.0,
        classes: str = "runner-up",
        improvement: tuple[float, float] = (0.02, 0.001),
        iterations: int = 100,
        halving: bool = True,
        seed: int | None = None,
    ) -> None: ...

class L2LinearRegionAttack(BaseLinearRegion):
    """See :class:`robust_ext.attacks.linear_region.attack.LinearRegion`."""

class LinfLinearRegionAttack(BaseLinearRegion):
    """See :class:`robust_ext.attacks.linear_region.attack.LinearRegion`."""

class L1LinearRegionAttack(BaseLinearRegion):
    """See :class:`robust_ext.attacks.linear_region.attack.LinearRegion`."""

class BaseRayS(NativeMinimizationAttack):
    """See :class:`robust_ext.attacks.rays.RayS`."""

    def __init__(
        self,
        *,
        queries: int = 10000,
        tolerance: float = 0.001,
        keep_rows: bool = True,
    ) -> None: ...

class LinfRaySAttack(BaseRayS):
    """See :class:`robust_ext.attacks.rays.RayS`."""

class BaseSquare(NativeFixedEpsilonAttack):
    """See :class:`robust_ext.attacks.square.Square`."""

    def __init__(
        self,
        *,
        queries: int = 5000,
        p: float = 0.8,
        restarts: int = 1,
        loss: str = "margin",
        stop_early: bool = True,
        schedule: int | None = None,
        seed: int | None = None,
    ) -> None: ...

class LinfSquareAttack(BaseSquare):
    """See :class:`robust_ext.attacks.square.Square`."""

class L2SquareAttack(BaseSquare):
    """See :class:`robust_ext.attacks.square.Square`."""

class L1SquareAttack(BaseSquare):
    """See :class:`robust_ext.attacks.square.Square`."""

class SpatialTransformationAttack(NativeNormlessAttack):
    """See :class:`robust_ext.attacks.spatial.SpatialTransformation`."""

    def __init__(
        self,
        *,
        translation: float = 8.0,
        rotation: float = 30.0,
        translation_steps: int = 5,
        rotation_steps: int = 31,
        mode: str = "grid",
        samples: int = 10,
        pad: str = "zero",
        loss: str = "ce",
        seed: int | None = None,
    ) -> None: ...

class BaseFeatureMatching(NativeFixedEpsilonAttack):
    """See :class:`robust_ext.attacks.feature_matching.FeatureMatching`."""

    def __init__(
        self,
        *,
        steps: int = 500,
        rel_stepsize: float = 0.04,
        abs_stepsize: float | None = None,
        restarts: int = 1,
        random_start: bool = True,
        samples: int = 1,
        reference: str = "nearest",
        confidence: float = 0.0,
        check_every: int = 1,
        features: Any = None,
        feature_distance: str = "l2",
        weight: float = 1.0,
        seed: int | None = None,
    ) -> None: ...

class LinfFeatureMatchingAttack(BaseFeatureMatching):
    """See :class:`robust_ext.attacks.feature_matching.FeatureMatching`."""

class L2FeatureMatchingAttack(BaseFeatureMatching):
    """See :class:`robust_ext.attacks.feature_matching.FeatureMatching`."""

class L1FeatureMatchingAttack(BaseFeatureMatching):
    """See :class:`robust_ext.attacks.feature_matching.FeatureMatching`."""

class BaseLogitMatching(NativeFixedEpsilonAttack):
    """See :class:`robust_ext.attacks.logit_matching.LogitMatching`."""

    def __init__(
        self,
        *,
        steps: int = 100,
        rel_stepsize: float = 0.01,
        abs_stepsize: float | None = None,
        restarts: int = 1,
        random_start: bool = True,
        samples: int = 20,
        reference: str = "nearest",
        confidence: float = 1.0,
        check_every: int = 10,
        logits: str = "both",
        margin_weight: float = 0.5,
        noise: str = "normal",
        level: float = 0.11764705882352941,
        seed: int | None = None,
    ) -> None: ...

class LinfLogitMatchingAttack(BaseLogitMatching):
    """See :class:`robust_ext.attacks.logit_matching.LogitMatching`."""

class L2LogitMatchingAttack(BaseLogitMatching):
    """See :class:`robust_ext.attacks.logit_matching.LogitMatching`."""

class L1LogitMatchingAttack(BaseLogitMatching):
    """See :class:`robust_ext.attacks.logit_matching.LogitMatching`."""

class BaseOrthogonalPGD(NativeFixedEpsilonAttack):
    """See :class:`robust_ext.attacks.orthogonal.OrthogonalPGD`."""

    def __init__(
        self,
        *,
        steps: int = 1000,
        rel_stepsize: float = 0.1,
        abs_stepsize: float | None = None,
        restarts: int = 1,
        random_start: bool = True,
        samples: int = 1,
        step: str = "l2",
        decay: bool = True,
        loss: str = "margin",
        confidence: float = 0.0,
        seed: int | None = None,
    ) -> None: ...

class LinfOrthogonalPGDAttack(BaseOrthogonalPGD):
    """See :class:`robust_ext.attacks.orthogonal.OrthogonalPGD`."""

class L2OrthogonalPGDAttack(BaseOrthogonalPGD):
    """See :class:`robust_ext.attacks.orthogonal.OrthogonalPGD`."""

class BaseSelectivePGD(NativeFixedEpsilonAttack):
    """See :class:`robust_ext.attacks.orthogonal.SelectivePGD`."""

    def __init__(
        self,
        *,
        steps: int = 1000,
        rel_stepsize: float = 0.1,
        abs_stepsize: float | None = None,
        restarts: int = 1,
        random_start: bool = True,
        samples: int = 1,
        step: str = "l2",
        decay: bool = True,
        loss: str = "margin",
        confidence: float = 0.0,
        seed: int | None = None,
    ) -> None: ...

class LinfSelectivePGDAttack(BaseSelectivePGD):
    """See :class:`robust_ext.attacks.orthogonal.SelectivePGD`."""

class L2SelectivePGDAttack(BaseSelectivePGD):
    """See :class:`robust_ext.attacks.orthogonal.SelectivePGD`."""

class L1SelectivePGDAttack(BaseSelectivePGD):
    """See :class:`robust_ext.attacks.orthogonal.SelectivePGD`."""

class BaseJointLoss(NativeFixedEpsilonAttack):
    """See :class:`robust_ext.attacks.joint_loss.JointLoss`."""

    def __init__(
        self,
        *,
        steps: int = 100,
        rel_stepsize: float = 0.2,
        abs_stepsize: float | None = None,
        restarts: int = 2,
        random_start: bool = True,
        samples: int = 1,
        step: str = "l2",
        decay: bool = True,
        loss: str = "margin",
        alpha: float = 1.0,
        seed: int | None = None,
    ) -> None: ...

class LinfJointLossAttack(BaseJointLoss):
    """See :class:`robust_ext.attacks.joint_loss.JointLoss`."""

class L2JointLossAttack(BaseJointLoss):
    """See :class:`robust_ext.attacks.joint_loss.JointLoss`."""

class L1JointLossAttack(BaseJointLoss):
    """See :class:`robust_ext.attacks.joint_loss.JointLoss`."""
