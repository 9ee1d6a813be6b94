"""The attacks of this project: what is in this list is on the command line, in both host libraries and in the docs."""

from __future__ import annotations

from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.carlini_linf import CarliniWagnerLinf
from robust_ext.attacks.feature_matching import FeatureMatching
from robust_ext.attacks.joint_loss import JointLoss
from robust_ext.attacks.linear_region.attack import LinearRegion
from robust_ext.attacks.linear_region.boundary import BoundarySearch
from robust_ext.attacks.logit_matching import LogitMatching
from robust_ext.attacks.native import NativeAttack
from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.attacks.orthogonal import OrthogonalPGD, SelectivePGD
from robust_ext.attacks.random_search import RandomSearch
from robust_ext.attacks.rays import RayS
from robust_ext.attacks.spatial import SpatialTransformation
from robust_ext.attacks.square import Square

ATTACKS: tuple[type[NativeAttack], ...] = (
    APGD,
    RandomSearch,
    ObjectivePGD,
    CarliniWagnerLinf,
    BoundarySearch,
    LinearRegion,
    RayS,
    Square,
    SpatialTransformation,
    FeatureMatching,
    LogitMatching,
    OrthogonalPGD,
    SelectivePGD,
    JointLoss,
)
