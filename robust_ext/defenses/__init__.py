"""Published defenses that optimise at test time, as modules from inputs to logits.

Source: Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022), table 1. They are
here to be attacked: the study found that none makes a classifier much more robust, and that some make it weaker.
"""

from robust_ext.defenses.adp import AdaptiveDenoising as AdaptiveDenoising
from robust_ext.defenses.aid import AIDPurifier as AIDPurifier
from robust_ext.defenses.anti_adversary import AntiAdversary as AntiAdversary
from robust_ext.defenses.clc import ClosedLoopControl as ClosedLoopControl
from robust_ext.defenses.hd import HedgeDefense as HedgeDefense
from robust_ext.defenses.imf import IMF as IMF
from robust_ext.defenses.input_transformations import BitDepthReduction as BitDepthReduction
from robust_ext.defenses.input_transformations import JPEGCompression as JPEGCompression
from robust_ext.defenses.input_transformations import MedianSmoothing as MedianSmoothing
from robust_ext.defenses.randomized_smoothing import RandomizedSmoothing as RandomizedSmoothing
from robust_ext.defenses.resize_pad import RandomResizePad as RandomResizePad
from robust_ext.defenses.reverse import ContrastiveReversal as ContrastiveReversal
from robust_ext.defenses.soap import SOAP as SOAP
from robust_ext.defenses.sodef import SODEF as SODEF
from robust_ext.defenses.training.discriminator import Discriminator as Discriminator
from robust_ext.defenses.training.discriminator import DiscriminatorTraining as DiscriminatorTraining
