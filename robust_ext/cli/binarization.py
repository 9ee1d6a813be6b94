"""``robust-ext binarization``."""

from __future__ import annotations

from typing import Any

from robust_ext.cli.adaptation import AdaptationOptions
from robust_ext.cli.loading import ThreatOptions
from robust_ext.cli.options import command
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.evaluations.binarization import BinarizationSettings, binarization_test


@settings_class
class BinarizationOptions(Settings):
    """Options of this command alone."""

    attack: tuple[str, ...] = setting(
        help="library:Name(key=value), module:callable or file.py:callable; repeatable.", panel="attack"
    )
    detector: str | None = setting(
        default=None,
        help="package.module:object or file.py:object: a detector, or what makes one of a model.",
        panel="detector",
    )
    detector_samples: int = setting(
        default=200,
        help="Further samples of the data to calibrate a detector without a threshold.",
        minimum=1,
        panel="detector",
    )
    calibrate: bool = setting(default=False, help="Find the hardness first, on --calibration-samples.")
    calibration_samples: int = setting(default=16, help="Samples for --calibrate.", minimum=1)


# At most so many, of which the sequential rule is as likely to pass a good attack as all of 64 are.
@command(BinarizationSettings, samples=128, sequential=True)
def binarization(
    run: ThreatOptions, own: BinarizationOptions, adapt: AdaptationOptions, settings: dict[str, Any]
) -> None:
    """Plant adversarial examples in a model and see whether an attack finds them."""
    threat_model = run.threat_model
    run.begin()
    further = 0 if own.detector is None else own.detector_samples
    samples = run.load_samples(seed=settings["seed"], further=further, at_most=settings["sequential"])
    with run.context(samples, detector=own.detector):
        result = binarization_test(
            adapt.check(run.load_model()),
            adapt.attacks(own.attack),
            samples.inputs,
            threat_model,
            labels=samples.labels,
            sample_ids=samples.ids,
            calibrate_on=min(own.calibration_samples, len(samples.ids)) if own.calibrate else 0,
            detector=own.detector,
            detector_data=samples.further,
            **run.keywords,
            **settings,
        )
    run.show(result)
