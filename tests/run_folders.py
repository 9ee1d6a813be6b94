"""What tests read of run folders."""

from robust_ext.engine.run_folder import RECORDS, SavedRun


def runs_of(folder):
    """The runs in a folder and in those in it, by place."""
    return {str(file.parent.relative_to(folder)): SavedRun(file.parent) for file in sorted(folder.rglob(RECORDS))}


def records_of(folder):
    """The records of each of them."""
    return {place: saved.records() for place, saved in runs_of(folder).items()}
