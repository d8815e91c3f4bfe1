"""rewriter: ordinary JAX code on the best kernels for its chip."""

from rewriter import cache as cache
from rewriter.bench import Benchmark as Benchmark
from rewriter.bench import benchmark as benchmark
from rewriter.bindings import Candidate as Candidate
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
from rewriter.errors import PatternError as PatternError
from rewriter.errors import RequirementNotMet as RequirementNotMet
from rewriter.errors import RewriterError as RewriterError
from rewriter.errors import RewriterWarning as RewriterWarning
from rewriter.errors import TraceError as TraceError
from rewriter.errors import UnknownKernel as UnknownKernel
from rewriter.errors import UnknownPattern as UnknownPattern
from rewriter.errors import VerificationFailed as VerificationFailed
from rewriter.export import Artifact as Artifact
from rewriter.export import export as export
from rewriter.export import load as load
from rewriter.kernel import Space as Space
from rewriter.optimize import Optimized as Optimized
from rewriter.optimize import explain as explain
from rewriter.optimize import optimize as optimize
from rewriter.pattern import Pattern as Pattern
from rewriter.pattern import pattern as pattern
from rewriter.pattern import register as register
from rewriter.pattern import scalar as scalar
from rewriter.report import Report as Report
from rewriter.tune import tune as tune
from rewriter.tuned import Tuned as Tuned
from rewriter.verify import Verification as Verification
from rewriter.verify import verify as verify

__version__ = "0.1.0"

_configure_logging()
