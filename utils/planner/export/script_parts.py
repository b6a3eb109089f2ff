"""The text that `script` puts together. Words in capitals inside of it are replaced there."""

START = '''
def start() -> torch.device:
    """Join the other ranks; this one's device."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl")
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")
'''

BATCH = '''
def batch(step: int, mesh: DeviceMesh, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's inputs and targets, (MICRO_BATCH * ACCUMULATE, LENGTH). Put your data here."""
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(CONFIG.vocabulary, (SEQUENCES, LENGTH + 1), generator=random)
    place, ranks = 0, 1
    for axis in DATA:
        place = place * MESH[axis] + mesh.get_local_rank(axis)
        ranks *= MESH[axis]
    mine = tokens.chunk(ranks)[place].to(device)
    return mine[:, :-1], mine[:, 1:]
'''

LAYERS_SPLIT = """
COLUMNS = [f"attention.{name}" for name in ("query", "key", "value")]
COLUMNS += ["feedforward.gate", "feedforward.up"]
ROWS = ["attention.output", "feedforward.down"]"""

STAGE = '''
class Stage(nn.Module):
    """Some blocks of the transformer; the first stage embeds, the last one predicts."""

    def __init__(self, model: Transformer, index: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(*STAGES[index])})
        self.embed = model.embed if index == 0 else None
        self.norm = model.norm if index == len(STAGES) - 1 else None
        self.head = model.head if index == len(STAGES) - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or the stream of the stage before -> the stream, or logits."""
        x = x if self.embed is None else self.embed(x)
        rotation = rotary(LENGTH, CONFIG.head_dim, CONFIG.rotary_base, x.device)
        for block in self.blocks.values():
            x = block(x, rotation)
        return x if self.head is None else self.head(self.norm(x))
'''

TENSOR = '''
def split(part: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallelism: each rank of tp holds some heads, channels and words."""
    block_plan = {name: ColwiseParallel() for name in COLUMNS}
    block_plan |= {name: RowwiseParallel() for name in ROWS}
    for block in part.blocks.children():
        parallelize_module(block, mesh["tp"], block_plan)
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    here = {name: style for name, style in ends.items() if getattr(part, name) is not None}
    if here:
        parallelize_module(part, mesh["tp"], here)
    if CONFIG.tied:
        part.head.weight = part.embed.weight
'''

TENSOR_SEQUENCE = '''
def split(part: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallelism, and between its layers each rank holds a part of every sequence."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    attended = PrepareModuleInput(
        input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
    )
    block_plan = {"attention": attended, "feedforward": gathered}
    block_plan |= {name: SequenceParallel() for name in ("attention_norm", "feedforward_norm")}
    block_plan |= {name: ColwiseParallel() for name in COLUMNS}
    block_plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ROWS}
    for block in part.blocks.children():
        parallelize_module(block, mesh["tp"], block_plan)
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    here = {name: style for name, style in ends.items() if getattr(part, name) is not None}
    if here:
        parallelize_module(part, mesh["tp"], here)
    if CONFIG.tied:
        part.head.weight = part.embed.weight
'''

RECOMPUTE = '''
def recompute(part: nn.Module) -> None:
    """Keep only each block's input, and run the block again in backward."""
    for name, block in list(part.blocks.named_children()):
        part.blocks.register_module(name, checkpoint_wrapper(block))
'''

SHARD = '''
def shard(part: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2, block by block; what is outside of the blocks forms one more group."""
    how = {
        "mesh": mesh[DATA],
HOW
    }
    for block in part.blocks.children():
        fully_shard(block, **how)
    fully_shard(part, **how)
'''

WHOLE_PARTS = "[Transformer(CONFIG)]"
PIPELINE_PARTS = (
    "[\n            Stage(Transformer(CONFIG), index)\n"
    '            for index in range(mesh.get_local_rank("pp"), len(STAGES), MESH["pp"])\n        ]'
)

BUILD = '''
def build(mesh: DeviceMesh, device: torch.device) -> list[nn.Module]:
    """This rank's parts of the model; no rank ever holds all of it."""
    with torch.device("meta"):
        parts = PARTS
    for part in parts:
        part.to(DTYPE)
STEPS
        part.to_empty(device=HOME)
        initialise(part, mesh)
    return parts
'''

INITIALISE = '''
@torch.no_grad()
def initialise(part: nn.Module, mesh: DeviceMesh) -> None:
    """Matrices from N(0, 0.02): each shard from a stream of its own, replicas alike."""
    seed = 0
    for axis in MESH:
        seed = seed * MESH[axis] + (mesh.get_local_rank(axis) if axis != "replicate" else 0)
    torch.manual_seed(seed)
    for name, parameter in part.named_parameters():
        values = parameter.to_local()
        if name.endswith("bias"):
            values.zero_()
        elif name.endswith("norm.weight"):
            values.fill_(1.0)
        else:
            values.normal_(std=0.02)
'''

LOAD = '''
def load(parts: list[nn.Module], path: Path) -> None:
    """Take this rank's shards from a full state_dict of `Transformer(CONFIG)`."""
    full = torch.load(path, mmap=True, weights_only=True)
    for part in parts:
        mine = {name: full[name] for name in get_model_state_dict(part)}
        set_model_state_dict(part, mine, options=StateDictOptions(full_state_dict=True))
'''

OPTIMIZER = '''
def make_optimizer(parts: list[nn.Module]) -> torch.optim.Optimizer:
    """AdamW; parameters on one mesh form one group, so that they are updated together."""
    groups: dict[DeviceMesh, list[nn.Parameter]] = {}
    for part in parts:
        for parameter in part.parameters():
            groups.setdefault(parameter.device_mesh, []).append(parameter)
    named = [{"params": group} for group in groups.values()]
    return torch.optim.AdamW(named, lr=LEARNING_RATE, fused=True)


def clip(optimizer: torch.optim.Optimizer, mesh: DeviceMesh, device: torch.device) -> None:
    """Scale all gradients down to a common norm of CLIP."""
    groups = [group["params"] for group in optimizer.param_groups]
    norms = [get_total_norm([p.grad for p in group]).full_tensor() for group in groups]
    square = torch.stack(norms).square().sum().to(device)
    if "pp" in MESH:
        dist.all_reduce(square, group=mesh.get_group("pp"))
    for group in groups:
        clip_grads_with_norm_(group, CLIP, square.sqrt())
'''

LOSS = '''
def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of one micro-batch."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
'''

LOSS_SPLIT = '''
def loss_of(logits: DTensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of one micro-batch; each rank of tp holds the logits of some words."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).full_tensor()
'''

STEP = '''
def make_step(parts: list[nn.Module], mesh: DeviceMesh, device: torch.device):
    """Forward and backward passes of one step, as a function of inputs and targets."""
    model = parts[0]

    def passes(inputs: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), device=device)
        pieces = zip(inputs.split(MICRO_BATCH), targets.split(MICRO_BATCH), strict=True)
        for index, (x, y) in enumerate(pieces):
            last = index == ACCUMULATE - 1
            model.set_is_last_backward(last)
SYNC
            loss = loss_of(model(x), y) / ACCUMULATE
            loss.backward()
            total += loss.detach()
        return total

    return passes
'''

PIPELINE_STEP = '''
def make_step(parts: list[nn.Module], mesh: DeviceMesh, device: torch.device):
    """Forward and backward passes of one step, as a function of inputs and targets."""
    places = range(mesh.get_local_rank("pp"), len(STAGES), MESH["pp"])
    stages = [
        PipelineStage(part, index, len(STAGES), device, group=mesh.get_group("pp"))
        for index, part in zip(places, parts, strict=True)
    ]
    schedule = SCHEDULE(GIVEN, n_microbatches=ACCUMULATE, loss_fn=loss_of)

    def passes(inputs: Tensor, targets: Tensor) -> Tensor:
        given = (inputs,) if 0 in places else ()
        losses: list[Tensor] = []
        ends = {"target": targets, "losses": losses} if len(STAGES) - 1 in places else {}
        schedule.step(*given, **ends, return_outputs=False)
        total = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
        total = total.detach()
        dist.all_reduce(total, group=mesh.get_group("pp"))  # only the last stage has a loss
        return total

    return passes
'''

MAIN = '''
def train(mesh: DeviceMesh, device: torch.device, steps: int, weights: Path | None) -> list[float]:
    """Train for some steps; the loss of each, over the global batch."""
    parts = build(mesh, device)
    if weights is not None:
        load(parts, weights)
    optimizer, passes = make_optimizer(parts), make_step(parts, mesh, device)
    losses = []
    for step in range(steps):
FORWARD
        clip(optimizer, mesh, device)
        optimizer.step()
        optimizer.zero_grad()
        for axis in DATA:
            dist.all_reduce(loss, group=mesh.get_group(axis))
            loss /= MESH[axis]
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step} loss {losses[-1]:.4f}", flush=True)
    return losses


def main() -> None:
    """Read the command line, train, leave."""
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--weights", type=Path, help="full state_dict to start from")
    given = options.parse_args()
    device = start()
    mesh = init_device_mesh(device.type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    train(mesh, device, given.steps, given.weights)
    dist.destroy_process_group()
    del mesh
    gc.collect()  # sharded modules hold groups in cycles: their threads must end before Python does
'''

RUN = '''\
if __name__ == "__main__":
    main()
'''
