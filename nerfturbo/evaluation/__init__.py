"""Scores on unseen views, camera paths, the run folder and its report."""

from .camera_path import orbit_path
from .evaluate import Evaluation, ViewScore, evaluate
from .metrics import psnr, ssim
from .report import write_report
from .run_folder import RunFolder, open_run

__all__ = ["Evaluation", "RunFolder", "ViewScore", "evaluate", "open_run", "orbit_path", "psnr", "ssim", "write_report"]
