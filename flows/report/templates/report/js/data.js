// What the page embeds: keys as columns, and for each way to cut a tensor the rows of its chunks.
// It is unpacked when it is first asked for.

class Contents {
  constructor(document_, keys) {
    this.patterns = document_.patterns;
    this.packed = document_.pools;
    this.pools = [];
    this.packedPlaces = document_.places;
    this.places = [];
    Object.assign(this, keys);
    this.numbers = null;
  }

  static async read(text) {
    const embedded = JSON.parse(text);
    const keys = JSON.parse(new TextDecoder().decode(await inflated(embedded.keys)));
    return new Contents(embedded, keys);
  }

  get count() { return this.names.length; }
  shapeOf(key) { return this.shapes[this.shape[key]]; }
  typeOf(key) { return this.dtypes[this.dtype[key]]; }

  numberOf(name) {
    this.numbers ??= new Map(this.names.map((each, i) => [each, i]));
    return this.numbers.get(name);
  }

  writer(file) {
    if (file < 0) return "an unnamed file";
    const rank = this.ranks[file];
    return rank < 0 ? this.files[file] : `rank ${rank}`;
  }

  // Whether the bytes of a chunk are not there: no such file, or one that ends before them.
  lost(file, range) {
    return file < 0 || this.sizes[file] < 0 || (Boolean(range) && range[1] > this.sizes[file]);
  }

  // Colour and texture go by rank, or by file where names do not tell the rank.
  hue(file) {
    if (file < 0) return -1;
    return this.ranks[file] < 0 ? file : this.ranks[file];
  }

  // {rows, dims, offset(row, dim), size(row, dim), file(row), count(row)} of a tensor's chunks.
  async chunksOf(key) {
    const pattern = this.pattern[key];
    if (this.shapeOf(key) === null || pattern < 0) return null;
    const [pool, start, rows, coarse] = this.patterns[pattern];
    this.pools[pool] ??= unpacked(this.packed[pool]);
    const columns = await this.pools[pool];
    const dims = this.shapeOf(key).length;
    return {
      rows,
      dims,
      coarse: Boolean(coarse),
      offset: (row, dim) => columns[dim][start + row],
      size: (row, dim) => columns[dims + dim][start + row],
      file: (row) => columns[2 * dims][start + row],
      count: coarse ? (row) => columns[2 * dims + 1][start + row] : () => 1,
    };
  }

  // [first byte, end) of each chunk within its file, for files given by file(row); null if the page leaves them out.
  async rangesOf(key, rows, file) {
    let start = this.place[key];
    if (start < 0) return null;
    let pool = 0;
    while (start >= this.packedPlaces[pool][1]) start -= this.packedPlaces[pool++][1];
    this.places[pool] ??= unpacked(this.packedPlaces[pool]);
    const [behind, length] = await this.places[pool];
    const ends = new Map();
    return Array.from({ length: rows }, (_, row) => {
      const begin = (ends.get(file(row)) ?? 0) + behind[start + row];
      const end = begin + length[start + row];
      ends.set(file(row), end);
      return file(row) < 0 ? null : [begin, end];
    });
  }
}

async function inflated(text) {
  const data = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([data]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function unpacked([columns, rows, wide, text]) {
  const data = await inflated(text);
  const steps = wide ? new Float64Array(data.buffer) : new Int32Array(data.buffer);
  return Array.from({ length: columns }, (_, column) => {
    const values = new Float64Array(rows);
    let value = 0;
    for (let row = 0; row < rows; row += 1) values[row] = value += steps[column * rows + row];
    return values;
  });
}
