"""rewriter: ordinary JAX code on the best kernels for its chip."""

from rewriter._moved import keep_old_paths as _keep_old_paths
from rewriter.config import Config as Config
from rewriter.config import config as config
from rewriter.config import configure_logging as _configure_logging
from rewriter.config import using as using
from rewriter.errors import BundleMismatch as BundleMismatch
from rewriter.errors import CacheWarning as CacheWarning
from rewriter.errors import ConfigError as ConfigError
from rewriter.errors import DeviceMismatch as DeviceMismatch
from rewriter.errors import DuplicateName as DuplicateName
from rewriter.errors import ExportError as ExportError
from rewriter.errors import KernelError as KernelError
from rewriter.errors import NotTraceable as NotTraceable
from rewriter.errors import PatternError as PatternError
from rewriter.errors import RequirementNotMet as RequirementNotMet
from rewriter.errors import RewriterError as RewriterError
from rewriter.errors import RewriterWarning as RewriterWarning
from rewriter.errors import StateLost as StateLost
from rewriter.errors import TraceError as TraceError
from rewriter.errors import UnknownKernel as UnknownKernel
from rewriter.errors import UnknownOption as UnknownOption
from rewriter.errors import UnknownPattern as UnknownPattern
from rewriter.errors import VerificationFailed as VerificationFailed
from rewriter.find.bindings import Candidate as Candidate
from rewriter.find.pattern import Pattern as Pattern
from rewriter.find.pattern import pattern as pattern
from rewriter.find.pattern import register as register
from rewriter.find.pattern import scalar as scalar
from rewriter.measure import cache as cache
from rewriter.measure.tuned import Tuned as Tuned
from rewriter.ops.kernel import Space as Space
from rewriter.reports.difference import Difference as Difference
from rewriter.reports.report import Report as Report
from rewriter.run.export import Artifact as Artifact
from rewriter.run.export import export as export
from rewriter.run.export import load as load
from rewriter.run.optimize import Optimized as Optimized
from rewriter.run.optimize import explain as explain
from rewriter.run.optimize import optimize as optimize
from rewriter.run.tune import tune as tune
from rewriter.run.verify import Verification as Verification
from rewriter.run.verify import verify as verify
from rewriter.tools.bench import Benchmark as Benchmark
from rewriter.tools.bench import benchmark as benchmark

__version__ = "0.1.0"

_configure_logging()
_keep_old_paths(__name__)
