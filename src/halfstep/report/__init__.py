"""Reports: parts of pages as plain data, and the files made of them. Independent of training.

A page is a function that returns a `Document` of parts (`document.py`, `charts.py`); `render` makes HTML of it.
"""

from halfstep.report import charts, document
from halfstep.report.charts import *  # noqa: F403  # each file lists its classes
from halfstep.report.document import *  # noqa: F403
from halfstep.report.files import picture_file, plain, render, sarif_log, strict_json, write_page

__all__ = ["picture_file", "plain", "render", "sarif_log", "strict_json", "write_page"]
__all__ += charts.__all__
__all__ += document.__all__
