"""Reports: documents and charts as plain data, and the HTML file made of them. Independent of training."""

from halfstep.report import charts, document
from halfstep.report.charts import *  # noqa: F403  # each file lists its classes
from halfstep.report.document import *  # noqa: F403
from halfstep.report.html import MissingExtraError, picture_file, render, require_extra

__all__ = ["MissingExtraError", "picture_file", "render", "require_extra"]
__all__ += charts.__all__
__all__ += document.__all__
