"""One small dataclass per stage. Field docstrings are the command line's help; there is no second schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .config_values import from_dict as from_dict
from .config_values import to_dict as to_dict

NO_STEP_LIMIT = 1_000_000_000  # train.steps of a run that its time limit alone ends, however fast the machine is


@dataclass(frozen=True)
class DataConfig:
    """Which pictures, at what size."""

    source: str = "builtin:toybox"
    """A dataset folder, a folder of photos, a video, or builtin:NAME."""
    downscale: int = 1
    """Divide the width and height of every picture by this."""
    allow_outside: bool = False
    """Whether a scene's files may name pictures outside its folder."""
    cache: Literal["auto", "memory", "disk"] = "auto"
    """Pixels in memory, or in a memory-mapped file that later starts find again; auto: disk where memory is short."""
    pixels: Literal["auto", "device", "host"] = "auto"
    """Where pixels stay while training; host: fetched ahead, step by step. auto: host where the device is too small."""
    bounds: Literal["auto", "bounded", "unbounded"] = "auto"
    """Whether the scene has an end; auto decides by alpha, by the file's own box, or by how far its points reach."""
    ndc: bool = False
    """Bend a capture whose cameras all look one way into normalised device coordinates, as the NeRF paper does."""


@dataclass(frozen=True)
class GridConfig:
    """The occupancy grid that skips empty space."""

    enabled: bool = True
    """Without it every cell counts as occupied: rays are marched from end to end of the box."""
    resolution: int = 128
    """Cells per axis and level."""
    levels: int = 1
    """Nested boxes, each twice as large as the one before."""
    update_every: int = 16
    """Steps between updates."""
    warmup_steps: int = 256
    """Until this step an update refreshes every cell; later a quarter at random and a quarter of the occupied ones."""
    decay: float = 0.95
    """How much of its old density a refreshed cell keeps at most."""
    threshold: float = 0.01
    """A cell is occupied above this optical thickness (density x step)."""
    moments: int = 0
    """Scenes that move: random times at which an update looks at a cell, 1 to 4; the densest counts. 0: it is still."""
    hide_unseen: bool = False
    """At the end of training, empty the cells that no training picture shows: under a table, inside a body."""


@dataclass(frozen=True)
class FieldConfig:
    """The radiance field."""

    kind: Literal["ngp", "vanilla", "voxels", "factor", "tnerf", "dnerf", "ngp-time"] = "ngp"
    """Instant-NGP, the original NeRF, sparse voxels, planes x lines; tnerf, dnerf and ngp-time are for what moves."""
    n_levels: int = 16
    """Hash grid: number of resolutions."""
    n_features: int = 2
    """Hash grid: features per entry and level."""
    log2_entries: int = 19
    """Hash grid: at most 2^this entries per level."""
    base_resolution: int = 16
    """Hash grid: cells per axis of the coarsest level."""
    max_resolution: int = 2048
    """Hash grid: cells per axis of the finest level."""
    width: int = 64
    """Neurons per hidden layer (vanilla: 256)."""
    depth: int = 1
    """Hidden layers of the density network (vanilla: 8)."""
    color_depth: int = 2
    """Hidden layers of the colour network."""
    geo_features: int = 16
    """Outputs of the density network; the first is the density, all of them feed the colour network."""
    sh_degree: int = 4
    """Degree of the spherical harmonics of the view direction."""
    initial_density: float = 1.0
    """Instant-NGP: density everywhere at the start, per unit of length. A thin start leaves less fog before the
    cameras; one far too thin (0.02) paints everything at infinity."""
    anti_alias: bool = False
    """Hash grid: levels finer than the footprint of a pixel fade out (Zip-NeRF), for pictures from many distances."""
    checkpointing: bool = False
    """Vanilla: keep no hidden layers for the backward but compute them again: less memory, steps twice as long."""


@dataclass(frozen=True)
class VoxelConfig:
    """Sparse voxels (field.kind voxels): how fine, when subdivided, how smooth; field.sh_degree is the colour's."""

    resolutions: tuple[int, ...] = (64, 128, 256, 384)
    """Voxels per axis of the box, stage after stage; the first stage is dense."""
    subdivide_at: tuple[float, ...] = (0.02, 0.08, 0.25)
    """Shares of the run after which the next stage begins: voxels that no pixel shows go, the others are divided."""
    max_nodes: int = 1_500_000
    """Corners of voxels that memory is kept for: a stage that would need more is made coarser, never emptier."""
    min_steps: int = 200
    """Steps that a stage lasts at least, in the mean: what has not been trained yet says nothing."""
    prune_weight: float = 0.01
    """A voxel stays where it, or a neighbour, gives a training ray at least this share of its colour; or less, a
    quarter of the mean over all that is seen, while everything is thin."""
    prune_rays: int = 1 << 21
    """Rays of the training cameras that are looked along before voxels go."""
    initial_density: float = 0.1
    """Density at the start, per unit of world length."""
    density_speed: float = 10.0
    """How much faster than optim.lr the logarithm of the density moves."""
    tv_density: float = 1e-3
    """Weight of the total variation of the density's logarithm, over density_speed, in the loss."""
    tv_color: float = 1e-3
    """Weight of the total variation of the colour's coefficients in the loss."""
    tv_share: float = 0.01
    """Share of the corners, drawn at random, that the total variation is taken of at each step."""


@dataclass(frozen=True)
class SamplingConfig:
    """Where samples lie along rays, and how space without an end is folded."""

    kind: Literal["grid", "uniform", "hierarchy", "proposal"] = "grid"
    """Marching the occupancy grid; even; NeRF's coarse and fine fields; proposal networks (density-only hash grids)."""
    contraction: Literal["none", "sphere", "cube"] = "none"
    """Fold all space outside the box into a ball or cube around it, for the field, the grid and the proposals."""
    n_samples: int = 48
    """Samples per ray that the field sees (hierarchy: beside the coarse ones); the grid decides for itself."""
    coarse_samples: tuple[int, ...] = (256, 96)
    """Samples per ray of each proposal network, or of the coarse field."""
    spacing: Literal["uniform", "disparity", "mixed"] = "mixed"
    """First samples: even in distance, in 1 / distance, or in distance up to half a box and in 1 / distance beyond."""
    far: float = 1000.0
    """Contracted: rays end this many half boxes away."""
    steps: int = 512
    """Contracted grid: lattice steps per ray, spaced like the first samples."""
    anneal_steps: int = 1000
    """Until this step proposals are trusted less than they say, so that young ones do not miss anything."""
    interlevel: float = 1.0
    """Weight of the loss that keeps proposals above the field's own weights."""
    distortion: float = 0.002
    """Weight of the loss that pulls a ray's weights together (proposal)."""
    near_gradient: float = 0.0
    """Gradients of samples nearer than this many half boxes shrink by (distance / this)^2: against near floaters."""
    proposal_levels: int = 5
    """Proposal networks: resolutions of the hash grid."""
    proposal_log2_entries: int = 17
    """Proposal networks: at most 2^this entries per resolution."""
    proposal_resolutions: tuple[int, ...] = (128, 256)
    """Proposal networks: cells per axis of the finest resolution of each."""
    proposal_width: int = 16
    """Proposal networks: neurons of the hidden layer."""


@dataclass(frozen=True)
class FactorConfig:
    """Planes and lines (field.kind factor): how fine, how many; field.width is the colour network's."""

    resolutions: tuple[int, ...] = (128, 300)
    """Nodes per axis of planes and lines, stage after stage."""
    refine_at: tuple[float, ...] = (0.15,)
    """Shares of the run after which the next stage begins."""
    min_steps: int = 200
    """Steps that a stage lasts at least, in the mean."""
    density_components: int = 8
    """Products of a plane and a line for each of the three axes, of the density."""
    color_components: int = 16
    """And of the colour's features."""
    initial_density: float = 0.1
    """Density at the start, per unit of world length."""
    net_lr: float = 2e-3
    """Peak learning rate of the colour network; optim.lr is that of planes and lines."""


@dataclass(frozen=True)
class MotionConfig:
    """How a field follows a scene that moves (kinds tnerf, dnerf and ngp-time)."""

    time_frequencies: int = 6
    """T-NeRF, D-NeRF: time goes in as so many sines and cosines."""
    follow: Literal["deform", "features", "both"] = "features"
    """ngp-time: move each point to where it was at time 0, give the networks features of place and time, or both."""
    n_levels: int = 5
    """ngp-time: resolutions of the three grids over (x, y, t), (y, z, t) and (x, z, t)."""
    log2_entries: int = 17
    """ngp-time: at most 2^this entries per level of these grids."""
    max_resolution: int = 128
    """ngp-time: cells per axis of space at the finest; the coarsest has 8."""
    time_resolution: int = 25
    """ngp-time: cells along time at the finest; coarser levels have fewer in proportion."""
    guide_levels: int = 4
    """ngp-time: so many coarse levels of the scene's grid say where points move; finer ones would pull to and fro."""


@dataclass(frozen=True)
class RenderConfig:
    """How rays are marched and composited."""

    steps_per_diagonal: int = 1024
    """Step size: the diagonal of the box over this."""
    cone_angle: float = 0.0
    """Steps grow with distance by this factor; 0 for objects, 0.004 for unbounded scenes."""
    early_stop_eps: float = 1e-4
    """Stop a ray when less than this much light passes."""
    alpha_thre: float = 0.0
    """Skip samples less opaque than this (1e-2 for real 360 scenes)."""
    prune: bool = True
    """Evaluate density first and train only on samples that are seen."""
    thin: float = 0.0
    """Adaptive sampling: of up to four neighbours that together add no more than this to their pixel (0.05, say) one,
    drawn by chance, is trained and stands for all of them; 0 trains all that are seen."""
    eval_refine: int = 1
    """Pictures are rendered with steps this many times shorter than those of training."""
    eval_rays: int = 1
    """Pictures are rendered with this x this rays per pixel."""


@dataclass(frozen=True)
class LossConfig:
    """What is added to the colour loss, ray by ray; with all weights 0 nothing is computed."""

    distortion: float = 0.0
    """Weight of Mip-NeRF 360's distortion: a ray's light comes from one place. Lengths are in box diagonals."""
    opacity: float = 0.0
    """Weight of the entropy of each ray's opacity: a ray is blocked or it is not."""
    sparsity: float = 0.0
    """Weight of log(1 + 2 (density x length)^2), summed along each ray: thin fog goes first."""


@dataclass(frozen=True)
class OptimConfig:
    """Adam and its schedule."""

    lr: float = 1e-2
    """Peak learning rate."""
    schedule: Literal["exponential", "cosine", "multistep", "constant"] = "exponential"
    """The way from the peak to the end, after the warm-up; steps that are skipped do not count."""
    final_lr_fraction: float = 0.03
    """Learning rate at the end, as a fraction of the peak (exponential and cosine)."""
    milestones: tuple[float, ...] = (0.5, 0.75, 0.9)
    """Multistep: shares of the run after which the learning rate falls."""
    milestone_factor: float = 0.33
    """Multistep: what it is multiplied by each time."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises linearly."""
    hold_fraction: float = 0.3
    """Share of the run before the decay begins."""
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-15
    """A tiny epsilon lets rarely touched hash entries move at full speed."""
    weight_decay: float = 1e-6
    """Pulls the network weights (never the hash table) to zero."""
    table_decay: float = 0.0
    """Adds this times the mean square of each level of the hash table to the loss, as in Zip-NeRF (0.1 there)."""
    skip_untouched: bool = True
    """Hash entries without a gradient keep their value and moments."""
    clip_norm: float = 0.0
    """Gradients longer than this (all together, unscaled) are shortened to it; 0 leaves them alone."""
    ema_decay: float = 0.0
    """Score and render a running mean of the weights with this memory per step (0.999, say); 0 takes the weights."""
    ema_every: int = 1
    """Steps between two updates of the mean: it costs a pass over all weights."""


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = 20_000
    """Training stops after this many steps."""
    time_limit: float | None = None
    """Training stops after this many seconds; the learning rate then follows the clock."""
    batch_samples: int = 1 << 18
    """Samples trained per step; the number of rays adapts to fill it."""
    max_rays: int = 1 << 16
    """At most this many rays per step."""
    initial_rays: int = 4096
    """Rays of the first step."""
    marched_per_trained: int = 6
    """The visibility pass may look at this many times the trained samples."""
    accumulate: int = 1
    """Batches whose gradients are added up before each update: a larger batch in the same memory."""
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """Of the hash table and the networks; sums, positions and compositing stay fp32. auto: fp16 on a GPU."""
    on_instability: Literal["warn", "lower-lr", "stop"] = "warn"
    """When the loss scale keeps falling: say so, halve the learning rate, or stop."""
    target_psnr: float | None = None
    """Training stops when a preview of a test view reaches this many dB."""
    coarse_fraction: float = 0.0
    """This share of the run trains on shrunken pictures, the rest on the full ones."""
    coarse_downscale: int = 4
    """How much smaller the shrunken pictures are in width and height."""
    capture: bool = True
    """On a GPU, record the whole step as one CUDA graph."""
    compress_gradients: Literal["none", "bf16", "fp16"] = "none"
    """Between several processes, send gradients in this precision: half the bytes, rounded once per rank."""
    background: Literal["random", "white", "black"] = "random"
    """Behind transparent pixels in training; random teaches the field where it is empty."""
    draw: Literal["uniform", "error"] = "uniform"
    """Which pixels: all alike, or more of those where the error is large, with weights that keep the mean right."""
    rays_per_pixel: int = 1
    """A pixel is compared with the mean of so many rays, through random points of it (of each quarter, for 4)."""
    pixel_spread: float = 0.0
    """Rays pass through a random point this many pixels wide around a pixel's centre (1: anywhere in the pixel)."""
    loss: Literal["huber", "mse"] = "huber"
    """Colour loss; Huber's delta is 0.1."""
    seed: int = 0
    """Decides every random draw together with the step."""


@dataclass(frozen=True)
class CameraConfig:
    """Corrections of the training cameras, learned with the field; see docs/cameras.md."""

    refine: bool = False
    """Correct the pose of every training picture by gradients to its rays."""
    focal: bool = False
    """Correct the focal length of every lens too, one factor for all pictures it took."""
    lr: float = 1e-3
    """Peak learning rate of the corrections: radians, and half sides of the scene's box."""
    fade_in: float = 0.4
    """Levels of the hash grid are faded in, coarse to fine, over this share of the run; 0: all from the start."""
    first_levels: int = 4
    """Levels of the hash grid that are there from the start."""

    @property
    def learns(self) -> bool:
        return self.refine or self.focal


@dataclass(frozen=True)
class PhotoConfig:
    """What is particular to each photo, and what is known about its depth."""

    exposure: bool = False
    """Learn the exposure and white balance of every photo; new views get the mean of all photos."""
    appearance: int = 0
    """Numbers learned per photo that its colours may depend on (8, say); new views get the mean, or a photo's."""
    lr: float = 5e-3
    """Peak learning rate of exposures and appearances."""
    depth_weight: float = 0.0
    """Weight of a loss that draws rays through COLMAP's features to the depth of their points; 0.05, say."""
    depth_rays: int = 256
    """Such rays per step."""


@dataclass(frozen=True)
class Config:
    """Everything that decides a run."""

    preset: str = "custom"
    """Where the values came from."""
    data: DataConfig = DataConfig()
    grid: GridConfig = GridConfig()
    field: FieldConfig = FieldConfig()
    voxels: VoxelConfig = VoxelConfig()
    factor: FactorConfig = FactorConfig()
    motion: MotionConfig = MotionConfig()
    render: RenderConfig = RenderConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    cameras: CameraConfig = CameraConfig()
    photo: PhotoConfig = PhotoConfig()
    sampling: SamplingConfig = SamplingConfig()
