"""What to say of errors that PyTorch and other libraries raise without a class of their own.

Each is known by words in it. What is said begins with a verb: the place comes before it.
"""

from __future__ import annotations

from utils.shims.ddp import COMM_HOOK, NOT_SYNCED


class NotSimulated(RuntimeError):
    """What the simulator itself refuses: a sentence from its verb on; its place is put before it."""


NO_FORM = "There was no fake impl registered"
_NO_GPU = (
    "looks for a GPU in a way that a simulation cannot answer. Replace it by plain operations, such "
    "as F.scaled_dot_product_attention with a mask for flex_attention, or run this step for real."
)
_READS_MEMORY = (
    "reads the memory of a tensor, as .numpy() and code in C++ do, and simulated tensors have none. "
    "Leave it out of the step, or make it an operator with torch.library.custom_op, and say what "
    "its results look like with register_fake."
)
_STATIC_STAGES = (
    "runs a PipelineStage that must learn its shapes and gradients from its neighbours, who are not "
    "there. Give it input_args and output_args, as tensors of one micro-batch, and call "
    "requires_grad_() on both: only then does a stage expect gradients from the next."
)
_NO_MODEL = (
    "looks for a model where there is none ({error}) Give the folder that save_pretrained() wrote, "
    "with its config.json and its *.safetensors, or the name of a model that this machine has."
)
_NOT_HERE = (
    "asks the Hub for files that are not on this machine, and a simulation downloads nothing. "
    "Download them once (`hf download NAME`; for a gated model ask for access and `hf auth login` "
    "first), or make the model from its configuration alone, by from_config()."
)
_NO_LAUNCH = (
    "launches a kernel of Triton, which needs a GPU. Make it an operator with "
    "torch.library.triton_op or custom_op, and say what its results look like with register_fake."
)
_WORDS: dict[str, str] = {
    "Creating a new Tensor subclass": (
        "makes a tensor of a class of its own around one without data, as bitsandbytes' "
        "Linear8bitLt does, and PyTorch has no way to. Use Linear4bit or plain layers, or run this "
        "step for real."
    ),
    "hasPrimaryContext": _NO_GPU,
    "Found no NVIDIA driver": _NO_GPU,
    "not compiled with CUDA": _NO_GPU,
    "Please convert all Tensors to FakeTensors first": (
        "uses a tensor that was made before the simulation and holds real data. Make the inputs "
        "inside the step, and all else inside build()."
    ),
    "data pointer": _READS_MEMORY,
    "data is not allocated": _READS_MEMORY,
    "Not available for 'meta' device type": _READS_MEMORY,
    "_share_fd_": _READS_MEMORY,
    "requires dynamic shape inference": _STATIC_STAGES,
    "Failed to run stage backward": _STATIC_STAGES,
    ".numpy() is not supported": (
        "asks for the values of a tensor (.numpy()), and simulated tensors have none. Leave it "
        "out of the step."
    ),
    "with arguments from the '": (
        "puts a tensor on a device that is not there. A simulation has the one that it is given, "
        "'cuda', and its host, 'cpu'."
    ),
    "'OrderedDictWrapper' object": (
        "makes a module of the class torch.jit.ScriptModule, which keeps its tensors in C++. Make it "
        "an nn.Module: the step is then simulated as it runs in Python."
    ),
    # Models of transformers, in files.
    "Unrecognized model in": _NO_MODEL,
    "does not appear to have a file named": _NO_MODEL,
    "Error no file named": _NO_MODEL,
    "Repo id must be": _NO_MODEL,
    "is not a valid JSON file": _NO_MODEL,
    "is not a local folder and is not a valid model identifier": _NOT_HERE,
    "couldn't connect to 'https://huggingface.co'": _NOT_HERE,
    "outgoing traffic has been disabled": _NOT_HERE,
    "offline mode is enabled": _NOT_HERE,
    "requires you to execute custom code": (
        "loads a model that comes with code of its own, which nobody runs unasked. Read that code, "
        "and then say trust_remote_code=True."
    ),
    "unexpected keyword argument 'load_in_": (
        "passes load_in_4bit or load_in_8bit by itself, which this version of transformers refuses "
        "without a simulation as well. Write "
        "quantization_config=BitsAndBytesConfig(load_in_4bit=True)."
    ),
    # What runs on GPUs alone.
    "libcuda.so cannot found": _NO_LAUNCH,
    "0 active drivers": _NO_LAUNCH,
    "SyncBatchNorm expected input tensor to be on GPU": (
        "runs SyncBatchNorm, whose kernels exist on GPUs alone. Simulate with plain BatchNorm: what "
        "the ranks exchange is two numbers a channel, and a count."
    ),
    COMM_HOOK: (
        "registers a communication hook, which sends gradients in a form of its own. Leave it out: "
        "what is simulated then is the plain all-reduce of each bucket."
    ),
    NOT_SYNCED: (
        "runs the first backward of DistributedDataParallel(static_graph=True) inside no_sync(), "
        "which PyTorch refuses on GPUs as well (expect_autograd_hooks_ in reducer.cpp). Let a step "
        "with all gradients come first, or leave out static_graph."
    ),
    "There was no rule registered for HigherOrderOperator": _NO_GPU,
    "CUDA error": _NO_GPU,
    "fake mode (": (
        "exports or traces the model (torch.export), which makes tensors without data of its own. "
        "Leave it out of the step."
    ),
    "Error building extension": (
        "builds an extension in C++, for an optimizer of DeepSpeed's or the like, and that takes a GPU "
        "and its compiler. Give it an optimizer of PyTorch's instead, "
        "optimizer=torch.optim.AdamW(...)."
    ),
    "Modules must not have hooks registered at the time they are passed": (
        "captures a CUDA graph (make_graphed_callables), whose memory is a pool of its own. Leave "
        "it out: the step is then simulated as it runs without, and the graph keeps its peak."
    ),
    "self.shape_env must not be None": (
        "makes a jagged tensor (torch.nested), whose lengths are values, and simulated tensors have "
        "none. Pad the rows, or run this step for real."
    ),
    "Can't pickle local object 'WeakValueDictionary": (
        "saves tensors, or sends them to another process, and simulated ones have nothing to save. "
        "Leave it out of the step."
    ),
}


def sentence(error: Exception) -> str | None:
    """What to say of an error of a library; None if it is the program's own."""
    text = str(error)
    said = next((said for words, said in _WORDS.items() if words in text), None)
    return said and said.replace("{error}", first_line(error))


def first_line(error: Exception) -> str:
    """The first line of what an error says, as a sentence."""
    first = str(error).strip().partition("\n")[0].rstrip(".:")
    return f"{first}."
