"""What is known of a library's attacks, as data: how a name is found, what it stands for, and what is listed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Generic, TypeVar

from robust_ext.attacks.base import AttackTraits
from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError
from robust_ext.core.specification import did_you_mean
from robust_ext.registry.base import AttackListing


@dataclass(frozen=True, kw_only=True)
class AttackEntry:
    """What is known of one attack of a library; each library adds what its own attacks need.

    Args:
        traits: What it needs and how it treats the samples of a batch, with the library's default settings.
        trial: Settings with which it runs fast, and finds something where it can.
        trial_norm: Norm of that trial; linf where it can be run for it, else l2, when left out.
        misses: Why that trial finds nothing on one of the targets of the matrix, in words; empty where it does.
        defect: What is wrong with it in the library, in words; empty where nothing is known.
        channels: The only number of channels it works with; 1 where any will do.
    """

    traits: AttackTraits
    trial: Mapping[str, Any] = field(default_factory=dict)
    trial_norm: str = ""
    misses: str = ""
    defect: str = ""
    channels: int = 1


E = TypeVar("E", bound=AttackEntry)


@dataclass(frozen=True, kw_only=True)
class Catalogue(Generic[E]):
    """All attacks of a library, which are classes or functions.

    Args:
        library: Prefix of attack strings, and the package that holds the attacks.
        place: The module in which people find them.
        members: What can be named, aliases included; None for one that is not imported because it cannot be used.
        entries: What is known of each that can be used, by name.
        unusable: Why others cannot be used and what to use instead, by name.
        others: What is taken for known of a class that is not the library's own.
        base: Class of all attacks.
    """

    library: str
    place: str
    members: Mapping[str, Any]
    entries: Mapping[str, E]
    unusable: Mapping[str, str]
    others: E
    base: type = FunctionType

    def find(self, name: str, *, argument: str = "attack") -> Any:
        """The class or function called ``name``, aliases included.

        InvalidArgumentError names near ones, or states why it cannot be used; MissingDependencyError names the package.
        """
        if name in self.members:
            if self.members[name] is None:
                raise self.refusal(name, argument)
            return self.members[name]
        if name in self.entries:
            missing = " ".join(self.entries[name].traits.packages)
            raise MissingDependencyError(f"{self.library}:{name} needs {missing}; pip install {missing}")
        near = did_you_mean(name, [other for other in self.members if self._label(other) in self.entries])
        expected = f"the name of an attack in {self.place}{near or '; robust-ext attacks lists them'}"
        raise InvalidArgumentError(argument, f"{self.library}:{name}", expected)

    def entry(self, attack_class: type, *, argument: str = "attack") -> E:
        """What is known of a class; InvalidArgumentError states why it is no attack, or cannot be used here."""
        label = attack_class.__name__
        if not issubclass(attack_class, self.base):
            raise InvalidArgumentError(argument, f"{self.library}'s {label}", f"one of the attacks in {self.place}")
        if not self.owns(attack_class):
            return self.others
        if label not in self.entries:
            raise self.refusal(label, argument)
        return self.entries[label]

    def owns(self, member: Any) -> bool:
        """Whether a class or function is defined in the library."""
        return str(member.__module__).startswith(f"{self.library}.")

    def refusal(self, label: str, argument: str) -> InvalidArgumentError:
        """The error for an attack that cannot be used here."""
        reason = self.unusable.get(label, f"it is not known here; use one of the attacks in {self.place} that are")
        return InvalidArgumentError(argument, f"{self.library}:{label}", f"an attack that fits here: {reason}")

    def listings(self) -> list[AttackListing]:
        """One line for each attack under its own name, those that cannot be used included."""
        return [
            self._listing(name)
            for name, member in self.members.items()
            if self._label(name) == name and member is not self.base
        ]

    def _listing(self, name: str) -> AttackListing:
        aliases = tuple(other for other in self.members if other != name and self._label(other) == name)
        if name not in self.entries:
            reason = self.unusable.get(name, "it is not known here; use another attack")
            return AttackListing(name=name, aliases=aliases, reason=reason)
        entry = self.entries[name]
        return AttackListing(
            name=name,
            traits=entry.traits,
            aliases=aliases,
            trial=entry.trial,
            trial_norm=entry.trial_norm,
            misses=entry.misses,
            channels=entry.channels,
            defect=entry.defect,
        )

    def _label(self, name: str) -> str:
        return str(getattr(self.members[name], "__name__", name))
