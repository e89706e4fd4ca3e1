// What of a tensor is seen: two of its dimensions, a window on them, and an index into each other dimension.
// A tensor of one dimension is drawn as a strip, a scalar as one square.

class View {
  constructor(shape, chunks) {
    this.shape = shape;
    this.chunks = chunks;
    const cuts = shape.map((_, dim) => this.cutsAlong(dim));
    this.cuts = cuts;
    const order = shape.map((_, dim) => dim).sort((a, b) => (cuts[b] > 1) - (cuts[a] > 1) || shape[b] - shape[a]);
    const [first, second] = order.slice(0, 2).sort((a, b) => a - b);
    // The lower dimension runs down, as rows do; of a vector the only one runs across.
    this.down = second === undefined ? -1 : first;
    this.across = second === undefined ? first ?? -1 : second;
    this.fixed = shape.map(() => 0);
    this.whole();
  }

  cutsAlong(dim) {
    const seen = new Set();
    for (let row = 0; row < this.chunks.rows && seen.size < 2; row += 1) seen.add(this.chunks.offset(row, dim));
    return seen.size;
  }

  extent(dim) { return dim < 0 ? 1 : this.shape[dim]; }

  // Dimensions that are not drawn but along which chunks differ: there the picture depends on an index.
  get slices() {
    return this.shape.map((_, dim) => dim).filter((dim) => dim !== this.down && dim !== this.across && this.cuts[dim] > 1);
  }

  whole() { this.window = { x: 0, y: 0, w: this.extent(this.across), h: this.extent(this.down) }; }

  get isWhole() { return this.window.w === this.extent(this.across) && this.window.h === this.extent(this.down); }

  choose(down, across) { this.down = down; this.across = across; this.whole(); }

  zoom(to) {
    const { extent, across, down } = { extent: (dim) => this.extent(dim), across: this.across, down: this.down };
    const w = Math.min(extent(across), Math.max(1, Math.ceil(to.w)));
    const h = Math.min(extent(down), Math.max(1, Math.ceil(to.h)));
    this.window = {
      x: Math.max(0, Math.min(Math.floor(to.x), extent(across) - w)),
      y: Math.max(0, Math.min(Math.floor(to.y), extent(down) - h)),
      w, h,
    };
  }

  scale(factor, around) {
    const { x, y, w, h } = this.window;
    const at = around ?? { x: x + w / 2, y: y + h / 2 };
    this.zoom({ x: at.x - (w * factor) / 2, y: at.y - (h * factor) / 2, w: w * factor, h: h * factor });
  }

  // The rectangle of a box given by offset(dim) and size(dim), or null if it is not in the picture.
  placed(offset, size) {
    for (let dim = 0; dim < this.shape.length; dim += 1) {
      if (size(dim) <= 0) return null;
      if (dim !== this.down && dim !== this.across && (this.fixed[dim] < offset(dim) || this.fixed[dim] >= offset(dim) + size(dim))) return null;
    }
    const box = {
      x: this.across < 0 ? 0 : offset(this.across), w: this.across < 0 ? 1 : size(this.across),
      y: this.down < 0 ? 0 : offset(this.down), h: this.down < 0 ? 1 : size(this.down),
    };
    const { x, y, w, h } = this.window;
    return box.x < x + w && box.x + box.w > x && box.y < y + h && box.y + box.h > y ? box : null;
  }

  visible() {
    const { chunks } = this;
    const found = [];
    for (let row = 0; row < chunks.rows; row += 1) {
      const box = this.placed((dim) => chunks.offset(row, dim), (dim) => chunks.size(row, dim));
      if (box) found.push({ ...box, row, file: chunks.file(row), count: chunks.count(row) });
    }
    return found;
  }
}

// Too many boxes to see: cells of a grid over the window, each counting the chunks whose middle it holds.
function summed(boxes, window, columns, rows) {
  const cells = new Map();
  for (const box of boxes) {
    const x = Math.max(window.x, Math.min(window.x + window.w - 1e-9, box.x + box.w / 2));
    const y = Math.max(window.y, Math.min(window.y + window.h - 1e-9, box.y + box.h / 2));
    const column = Math.min(columns - 1, Math.floor(((x - window.x) / window.w) * columns));
    const row = Math.min(rows - 1, Math.floor(((y - window.y) / window.h) * rows));
    const at = row * columns + column;
    const cell = cells.get(at);
    if (!cell) cells.set(at, { ...box, left: box.x, top: box.y, right: box.x + box.w, bottom: box.y + box.h, files: new Set([box.file]), alone: true });
    else {
      cell.count += box.count;
      cell.lost += box.lost;
      cell.alone = false;
      cell.files.add(box.file);
      cell.left = Math.min(cell.left, box.x); cell.right = Math.max(cell.right, box.x + box.w);
      cell.top = Math.min(cell.top, box.y); cell.bottom = Math.max(cell.bottom, box.y + box.h);
    }
  }
  return [...cells.values()].map((cell) => ({
    ...cell, x: cell.left, y: cell.top, w: cell.right - cell.left, h: cell.bottom - cell.top,
    row: cell.alone ? cell.row : -1, file: cell.files.size === 1 ? cell.file : -2,
  }));
}
