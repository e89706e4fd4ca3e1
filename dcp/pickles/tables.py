"""The lists that the judgement of globals rests on.

`PERMITTED` is what may be asked for without a word; `REACHING_MODULES` and `REACHING` is what runs code,
touches files, processes or the network, or hands out attributes by name. What is in neither is unknown.
"""

from __future__ import annotations

from itertools import product


def _words(text: str) -> list[str]:
    return text.split()


_DTYPES = _words("""
    float16 float32 float64 bfloat16 complex32 complex64 complex128 bool
    int1 int2 int3 int4 int5 int6 int7 int8 int16 int32 int64
    uint1 uint2 uint3 uint4 uint5 uint6 uint7 uint8 uint16 uint32 uint64
    float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2
    bits8 bits16 bits1x8 bits2x4 bits4x2 qint8 qint32 quint8 quint4x2 quint2x4
""")
_QSCHEMES = _words("""
    per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric
    per_channel_affine_float_qparams
""")
_KINDS = _words("BFloat16 Bool Byte Char Double Float Half Int Long Short")
_REBUILD = _words("""
    parameter parameter_with_state qtensor tensor tensor_v2 tensor_v3 sparse_tensor
    meta_tensor_no_storage nested_tensor wrapper_subclass device_tensor_from_numpy
    device_tensor_from_cpu_tensor
""")

WEIGHTS_ONLY = frozenset(
    [
        "collections.OrderedDict",
        "collections.Counter",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
        "torch.Size",
        "torch.Tensor",
        "torch.device",
        "_codecs.encode",
        "builtins.bytearray",
        "builtins.set",
        "builtins.complex",
        "torch._tensor._rebuild_from_type_v2",
        "torch.storage.TypedStorage",
        "torch.storage.UntypedStorage",
        *(f"torch.{name}" for name in (*_DTYPES, *_QSCHEMES)),
        *(f"torch.{kind}Storage" for kind in _words("QInt8 QInt32 QUInt8 QUInt4x2 QUInt2x4")),
        *(
            f"{module}.{kind}{what}"
            for module, kind, what in product(("torch", "torch.cuda"), _KINDS, ("Tensor", "Storage"))
        ),
        *(
            f"{module}.Complex{kind}Storage"
            for module in ("torch", "torch.cuda")
            for kind in ("Float", "Double")
        ),
        *(
            f"{module}.{kind}Tensor"
            for module, kind in product(("torch.sparse", "torch.cuda.sparse"), _KINDS)
            if kind != "Bool"
        ),
        *(f"torch._utils._rebuild_{what}" for what in _REBUILD),
    ]
)
"""What ``torch.load(weights_only=True)`` takes of itself (torch 2.13)."""

WEIGHTS_ONLY_OPCODES = frozenset(
    _words("""
        PROTO STOP MARK GLOBAL REDUCE NEWOBJ BUILD BINPERSID BINGET LONG_BINGET BINPUT LONG_BINPUT
        APPEND APPENDS SETITEM SETITEMS TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_TUPLE EMPTY_LIST EMPTY_DICT EMPTY_SET
        NONE NEWFALSE NEWTRUE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINSTRING
    """)
)
"""The opcodes that it knows. What protocol 2 writes beside these is LONG4, for ints of over 255 bytes."""

_PATHS = _words("Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath")

PERMITTED = WEIGHTS_ONLY | frozenset(
    [
        "collections.defaultdict",
        "collections.deque",
        # Called on values, or the factory of a defaultdict; pickle spells empty bytes with `bytes`.
        *(
            f"builtins.{name}"
            for name in _words("frozenset slice range bytes str int float bool list tuple dict")
        ),
        *(
            f"numpy.{core}.multiarray.{name}"
            for core in ("core", "_core")
            for name in ("_reconstruct", "scalar")
        ),
        "numpy.core.numeric._frombuffer",
        "numpy._core.numeric._frombuffer",
        "numpy.ndarray",
        "numpy.dtype",
        *(f"datetime.{name}" for name in _words("date time datetime timedelta timezone")),
        *(f"{module}.{name}" for module, name in product(("pathlib", "pathlib._local"), _PATHS)),
        # How protocols 0 and 1 make any object; its class is named beside them.
        "copyreg._reconstructor",
        "builtins.object",
        # A buffer in memory, in which Transformer Engine keeps its extra state.
        "_io.BytesIO",
        "decimal.Decimal",
        "argparse.Namespace",
    ]
)
PERMITTED_MODULES = frozenset({"numpy.dtypes"})
"""Modules of which every name is permitted."""

NEVER = frozenset({"sys", "os", "posix", "nt"})
"""Modules from which torch, and so this package, takes nothing even where a user allows it by name."""

_RUNS_CODE = _words("""
    importlib _frozen_importlib _frozen_importlib_external imp zipimport pkgutil runpy codeop marshal
    pickle _pickle cPickle dill cloudpickle joblib shelve gc atexit pdb bdb timeit cProfile doctest
    unittest idlelib lib2to3 pydoc rlcompleter pip ensurepip venv distutils setuptools IPython
    numpy.f2py numpy.distutils numpy.testing
""")
_PROCESSES = _words("""
    subprocess _posixsubprocess multiprocessing _multiprocessing threading _thread concurrent asyncio
    pty tty fcntl ctypes _ctypes cffi _cffi_backend mmap numpy.ctypeslib winreg _winreg _winapi msvcrt
    pexpect paramiko fabric
""")
_FILES_AND_NETWORKS = _words("""
    shutil tempfile glob fileinput linecache dbm sqlite3 zipfile tarfile socket _socket socketserver
    ssl http.client http.server urllib.request ftplib smtplib poplib imaplib nntplib telnetlib xmlrpc
    wsgiref webbrowser requests.api requests.sessions logging.config logging.handlers antigravity
""")
_TORCH_LOADERS = _words("""
    torch.hub torch.jit torch.package torch.fx.graph_module torch.fx._symbolic_trace torch._dynamo
    torch._inductor torch.export torch._export torch.multiprocessing torch.distributed.rpc
    torch.distributed.run torch.distributed.launch torch.distributed.launcher torch.distributed.elastic
    torch.testing torch.ops torch.classes torch.utils.cpp_extension torch.utils.collect_env
    torch.utils.bottleneck torch.utils.model_zoo torch.utils.model_dump torch.utils.file_baton
    torch.utils.hipify torch.utils._config_module torch.utils.data.datapipes.utils
""")

REACHING_MODULES = NEVER.union(_RUNS_CODE, _PROCESSES, _FILES_AND_NETWORKS, _TORCH_LOADERS)
"""Modules of which every name, and every name of a module inside, reaches code, files or networks."""

REACHING = frozenset(
    f"{module}.{name}"
    for module, names in {
        "builtins": """eval exec compile getattr setattr delattr __import__ open globals locals vars
            breakpoint input help exit quit apply execfile reload file""",
        # Modules whose names are common ones, or which hold plain data types too, are listed by name.
        "code": "InteractiveInterpreter InteractiveConsole interact compile_command",
        "profile": "run runctx Profile",
        "trace": "Trace",
        "site": "main addsitedir addpackage execsitecustomize execusercustomize",
        "inspect": "getattr_static getmembers currentframe stack",
        "io": "open open_code FileIO",
        "_io": "open open_code FileIO",
        "types": "FunctionType LambdaType CodeType MethodType ModuleType new_class prepare_class",
        "operator": "attrgetter methodcaller call",
        "_operator": "attrgetter methodcaller call",
        # Not partial: it calls nothing when it is made, and whatever it would call is named beside it.
        "functools": "reduce",
        "_functools": "reduce",
        "copyreg": "pickle constructor add_extension remove_extension clear_extension_cache",
        "codecs": "open register register_error",
        "_codecs": "register register_error",
        "logging": "FileHandler basicConfig",
        "dataclasses": "make_dataclass",
        "requests": "get post put patch delete head options request",
        "httpx": "get post put patch delete head options request stream",
        "torch": "load save compile from_file",
        "torch.storage": "_load_from_bytes",
        "torch.serialization": "load save _load _legacy_load _legacy_save _save",
        "torch._utils": "_import_dotted_name",
        "torch._C": "PyTorchFileReader PyTorchFileWriter import_ir_module",
        "numpy": "load save savez savez_compressed fromfile memmap loadtxt genfromtxt savetxt fromregex",
        "numpy.lib.npyio": "load save savez savez_compressed loadtxt genfromtxt savetxt fromregex NpzFile",
        "numpy.lib._npyio_impl": "load save savez savez_compressed loadtxt genfromtxt savetxt fromregex",
        "pandas": "eval read_pickle to_pickle",
        "pandas.io.pickle": "read_pickle to_pickle",
        "yaml": "load unsafe_load full_load",
    }.items()
    for name in _words(names)
)
"""Single names that do."""
