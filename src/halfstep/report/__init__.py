"""Reports: documents and charts as plain data, and the files made of them. Independent of training."""

from halfstep.report import charts, document
from halfstep.report.charts import *  # noqa: F403  # each file lists its classes
from halfstep.report.document import *  # noqa: F403
from halfstep.report.html import MissingExtraError, picture_file, render, require_extra
from halfstep.report.sarif import SarifResult, sarif_log
from halfstep.report.strict_json import strict_json

__all__ = ["MissingExtraError", "SarifResult", "picture_file", "render", "require_extra", "sarif_log", "strict_json"]
__all__ += charts.__all__
__all__ += document.__all__
