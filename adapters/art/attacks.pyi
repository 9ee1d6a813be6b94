"""This project's own attacks as ART attacks; written by .ci/generate_host_stubs.py."""

from typing import Any

from torch import Tensor

from robust_ext.adapters.art.native import NativeEvasionAttack as NativeEvasionAttack
from robust_ext.adapters.art.objectives import ObjectiveLoss as ObjectiveLoss
from robust_ext.adapters.art.objectives import objective_estimator as objective_estimator

def art_class(attack_class: Any) -> Any: ...

class APGD(NativeEvasionAttack):
    """See :class:`robust_ext.attacks.apgd.APGD`."""

    def __init__(
        self,
        estimator: Any,
        norm: float | str = ...,
        eps: Any = 0.3,
        max_iter: int = 100,
        targeted: bool = False,
        num_random_init: int = 1,
        batch_size: int = 32,
        loss: str = "ce",
        target_classes: int = 9,
        rho: float = 0.75,
        momentum: float = 0.75,
        start: str = "random",
        warm: bool = False,
        stop_early: bool = False,
        seed: int | None = None,
        summary_writer: Any = False,
        verbose: bool = True,
    ) -> None: ...

class RandomSearch(NativeEvasionAttack):
    """See :class:`robust_ext.attacks.random_search.RandomSearch`."""

    def __init__(
        self,
        estimator: Any,
        norm: float | str = ...,
        eps: Any = 0.3,
        max_iter: int = 400,
        targeted: bool = False,
        batch_size: int = 32,
        outer: str = "corners",
        outer_share: float = 0.5,
        seed: int | None = None,
        summary_writer: Any = False,
        verbose: bool = True,
    ) -> None: ...

class ObjectivePGD(NativeEvasionAttack):
    """See :class:`robust_ext.attacks.objective_pgd.ObjectivePGD`."""

    def __init__(
        self,
        estimator: Any,
        norm: float | str = ...,
        eps: Any = 0.3,
        eps_step: float | None = None,
        max_iter: int | None = None,
        targeted: bool = False,
        batch_size: int = 32,
        objective: str = "ace",
        algorithm: str = "pgd",
        rel_step_size: float | None = None,
        start: str | None = None,
        best: bool = False,
        projection: str = "nearest",
        seed: int | None = None,
        summary_writer: Any = False,
        verbose: bool = True,
    ) -> None: ...

class CarliniWagnerLinf(NativeEvasionAttack):
    """See :class:`robust_ext.attacks.carlini_linf.CarliniWagnerLinf`."""

    def __init__(
        self,
        estimator: Any,
        norm: float | str = ...,
        max_iter: int = 200,
        targeted: bool = False,
        batch_size: int = 32,
        learning_rate: float = 0.01,
        initial_const: float = 1e-05,
        largest_const: float = 20.0,
        const_factor: float = 2.0,
        decrease_factor: float = 0.9,
        confidence: float = 0.0,
        summary_writer: Any = False,
        verbose: bool = True,
    ) -> None: ...

class BoundarySearch(NativeEvasionAttack):
    """See :class:`robust_ext.attacks.linear_region.boundary.BoundarySearch`."""

    def __init__(
        self,
        estimator: Any,
        norm: float | str = 2,
        targeted: bool = False,
        batch_size: int = 32,
        budget: float = 5000.0,
        budget_unit: str = "passes",
        starts: tuple[str, ...] = ("descent", "boundary", "noise"),
        target_classes: int = 3,
        draws: int = 8,
        start_steps: int = 60,
        survivors: int = 4,
        hops: int = 1000,
        pool: Tensor | None = None,
        pool_labels: Tensor | None = None,
        seed: int | None = None,
        summary_writer: Any = False,
        verbose: bool = True,
    ) -> None: ...

class LinearRegion(NativeEvasionAttack):
    """See :class:`robust_ext.attacks.linear_region.attack.LinearRegion`."""

    def __init__(
        self,
        estimator: Any,
        norm: float | str = 2,
        max_iter: int = 1000,
        targeted: bool = False,
        batch_size: int = 32,
        budget: float = 5000.0,
        budget_unit: str = "passes",
        starts: tuple[str, ...] = ("descent", "boundary", "noise"),
        target_classes: int = 3,
        draws: int = 8,
        start_steps: int = 60,
        survivors: int = 4,
        hops: int = 1000,
        pool: Tensor | None = None,
        pool_labels: Tensor | None = None,
        q: float = 0.8,
        gamma: float = 6.0,
        classes: str = "runner-up",
        improvement: tuple[float, float] = (0.02, 0.001),
        iterations: int = 100,
        halving: bool = True,
        seed: int | None = None,
        summary_writer: Any = False,
        verbose: bool = True,
    ) -> None: ...

class RayS(NativeEvasionAttack):
    """See :class:`robust_ext.attacks.rays.RayS`."""

    def __init__(
        self,
        estimator: Any,
        norm: float | str = ...,
        eps: Any = 0.3,
        max_iter: int = 10000,
        targeted: bool = False,
        batch_size: int = 32,
        tolerance: float = 0.001,
        stop: bool = True,
        keep_rows: bool = True,
        summary_writer: Any = False,
        verbose: bool = True,
    ) -> None: ...

class Square(NativeEvasionAttack):
    """See :class:`robust_ext.attacks.square.Square`."""

    def __init__(
        self,
        estimator: Any,
        norm: float | str = ...,
        eps: Any = 0.3,
        max_iter: int = 5000,
        targeted: bool = False,
        num_random_init: int = 1,
        batch_size: int = 32,
        p_init: float = 0.8,
        loss: str = "margin",
        stop_early: bool = True,
        schedule: int | None = None,
        seed: int | None = None,
        summary_writer: Any = False,
        verbose: bool = True,
    ) -> None: ...

class SpatialTransformation(NativeEvasionAttack):
    """See :class:`robust_ext.attacks.spatial.SpatialTransformation`."""

    def __init__(
        self,
        estimator: Any,
        targeted: bool = False,
        batch_size: int = 32,
        translation: float = 8.0,
        rotation: float = 30.0,
        translation_steps: int = 5,
        rotation_steps: int = 31,
        mode: str = "grid",
        samples: int = 10,
        pad: str = "zero",
        loss: str = "ce",
        seed: int | None = None,
        summary_writer: Any = False,
        verbose: bool = True,
    ) -> None: ...

class FeatureMatching(NativeEvasionAttack):
    """See :class:`robust_ext.attacks.feature_matching.FeatureMatching`."""

    def __init__(
        self,
        estimator: Any,
        norm: float | str = ...,
        eps: Any = 0.3,
        eps_step: float | None = None,
        max_iter: int = 500,
        targeted: bool = False,
        num_random_init: int = 1,
        batch_size: int = 32,
        rel_step_size: float = 0.04,
        start: str = "random",
        samples: int = 1,
        reference: str = "nearest",
        confidence: float = 0.0,
        check_every: int = 1,
        features: Any = None,
        distance: str = "l2",
        weight: float = 1.0,
        seed: int | None = None,
        summary_writer: Any = False,
        verbose: bool = True,
    ) -> None: ...

class LogitMatching(NativeEvasionAttack):
    """See :class:`robust_ext.attacks.logit_matching.LogitMatching`."""

    def __init__(
        self,
        estimator: Any,
        norm: float | str = ...,
        eps: Any = 0.3,
        eps_step: float | None = None,
        max_iter: int = 100,
        targeted: bool = False,
        num_random_init: int = 1,
        batch_size: int = 32,
        rel_step_size: float = 0.01,
        start: str = "random",
        samples: int = 20,
        reference: str = "nearest",
        confidence: float = 1.0,
        check_every: int = 10,
        logits: str = "both",
        margin_weight: float = 0.5,
        noise: str = "normal",
        level: float = 0.11764705882352941,
        seed: int | None = None,
        summary_writer: Any = False,
        verbose: bool = True,
    ) -> None: ...

class OrthogonalPGD(NativeEvasionAttack):
    """See :class:`robust_ext.attacks.orthogonal.OrthogonalPGD`."""

    def __init__(
        self,
        estimator: Any,
        norm: float | str = ...,
        eps: Any = 0.3,
        eps_step: float | None = None,
        max_iter: int = 1000,
        targeted: bool = False,
        num_random_init: int = 1,
        batch_size: int = 32,
        rel_step_size: float = 0.1,
        start: str = "random",
        samples: int = 1,
        step: str = "l2",
        decay: bool = True,
        loss: str = "margin",
        confidence: float = 0.0,
        seed: int | None = None,
        summary_writer: Any = False,
        verbose: bool = True,
    ) -> None: ...

class SelectivePGD(NativeEvasionAttack):
    """See :class:`robust_ext.attacks.orthogonal.SelectivePGD`."""

    def __init__(
        self,
        estimator: Any,
        norm: float | str = ...,
        eps: Any = 0.3,
        eps_step: float | None = None,
        max_iter: int = 1000,
        targeted: bool = False,
        num_random_init: int = 1,
        batch_size: int = 32,
        rel_step_size: float = 0.1,
        start: str = "random",
        samples: int = 1,
        step: str = "l2",
        decay: bool = True,
        loss: str = "margin",
        confidence: float = 0.0,
        seed: int | None = None,
        summary_writer: Any = False,
        verbose: bool = True,
    ) -> None: ...

class JointLoss(NativeEvasionAttack):
    """See :class:`robust_ext.attacks.joint_loss.JointLoss`."""

    def __init__(
        self,
        estimator: Any,
        norm: float | str = ...,
        eps: Any = 0.3,
        eps_step: float | None = None,
        max_iter: int = 100,
        targeted: bool = False,
        num_random_init: int = 2,
        batch_size: int = 32,
        rel_step_size: float = 0.2,
        start: str = "random",
        samples: int = 1,
        step: str = "l2",
        decay: bool = True,
        loss: str = "margin",
        alpha: float = 1.0,
        seed: int | None = None,
        summary_writer: Any = False,
        verbose: bool = True,
    ) -> None: ...
