"""Reports: a result as a table for the terminal, as one self-contained page, and as files in a folder.

Matplotlib, jinja2, Pillow and rich are imported when they are needed, not when this package is imported.
"""

from robust_ext.reports.kinds import FORMAT as FORMAT
from robust_ext.reports.kinds import badge as badge
from robust_ext.reports.kinds import figure as figure
from robust_ext.reports.kinds import leading_sentences as leading_sentences
from robust_ext.reports.kinds import report_page as report_page
from robust_ext.reports.kinds import report_text as report_text
from robust_ext.reports.kinds import save as save
from robust_ext.reports.pictures import Example as Example
