// The keys as a tree of disclosures that are filled when they are opened, and as a list while searching.

const PAGE = 200;

class KeyBrowser {
  constructor(contents, tree, search, marked, matches, chosen) {
    Object.assign(this, { contents, tree, search, marked, matches, chosen });
    this.current = -1;
    this.lines = new Map();
    this.root = this.branches();
    let timer = 0;
    const soon = () => { clearTimeout(timer); timer = setTimeout(() => this.update(), 120); };
    search.addEventListener("input", soon);
    marked.addEventListener("change", () => this.update());
    search.form.addEventListener("submit", (event) => { event.preventDefault(); this.update(); });
    search.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown") { event.preventDefault(); this.tree.querySelector("button, summary")?.focus(); }
    });
    tree.addEventListener("keydown", (event) => this.move(event));
    if (Object.keys(contents.marks).length) document.getElementById("only-marked").hidden = false;
    this.update();
  }

  // Nodes are {name, keys, bytes, marks, children: Map}; a key without siblings below it is a leaf.
  branches() {
    const { contents } = this;
    const node = (name) => ({ name, leaf: -1, keys: 0, bytes: 0, worst: "", children: new Map() });
    const root = node("");
    for (let key = 0; key < contents.count; key += 1) {
      let at = root;
      for (const part of [null, ...pathOf(contents.names[key])]) {
        if (part !== null) {
          if (!at.children.has(part)) at.children.set(part, node(part));
          at = at.children.get(part);
        }
        at.keys += 1;
        at.bytes += contents.bytes[key];
        const mark = contents.marks[key];
        if (mark && at.worst !== "error") at.worst = mark;
      }
      at.leaf = key;
    }
    return root;
  }

  update() {
    const text = this.search.value.trim();
    const only = this.marked.checked;
    if (!text && !only) {
      this.matches.value = plural(this.contents.count, "key");
      this.lines.clear();
      this.tree.replaceChildren(...this.listed([...this.root.children.values()], (each) => this.branch(each)));
      if (this.current >= 0) this.reveal(this.current);
      return;
    }
    const fits = matcher(text);
    const found = [];
    for (let key = 0; key < this.contents.count; key += 1) {
      if ((!only || this.contents.marks[key]) && fits(this.contents.names[key])) found.push(key);
    }
    this.matches.value = found.length ? `${plural(found.length, "key")} found` : "No key matches";
    this.tree.replaceChildren(...this.listed(found, (key) => this.leaf(key, this.contents.names[key])));
  }

  // The first `PAGE` items, and a button that gives the next ones.
  listed(items, show, from = 0) {
    const shown = items.slice(from, from + PAGE).map(show);
    const left = items.length - from - PAGE;
    if (left <= 0) return shown;
    const more = make("button", { class: "more", type: "button" }, `Show ${number(Math.min(PAGE, left))} of ${number(left)} more`);
    more.addEventListener("click", () => {
      const next = this.listed(items, show, from + PAGE);
      more.replaceWith(...next);
      (next[0].querySelector("summary") ?? next[0]).focus();
    });
    return [...shown, more];
  }

  branch(node) {
    if (!node.children.size) return this.leaf(node.leaf, node.name);
    // Lone descendants are one line: "layers.0.weight" needs no three clicks.
    let name = node.name;
    const top = node;
    while (node.children.size === 1 && node.leaf < 0) {
      node = node.children.values().next().value;
      name += `.${node.name}`;
      if (!node.children.size) return this.leaf(node.leaf, name);
    }
    const inside = make("div");
    const details = make("details", {},
      make("summary", {},
        make("span", { class: "name" }, name || "(empty)"),
        mark(node.worst),
        make("span", { class: "size" }, `${plural(node.keys, "key")}, ${bytes(node.bytes)}`)),
      inside);
    const fill = () => {
      if (inside.childNodes.length) return;
      const own = node.leaf >= 0 ? [this.leaf(node.leaf, "(itself)")] : [];
      inside.append(...own, ...this.listed([...node.children.values()], (each) => this.branch(each)));
    };
    details.addEventListener("toggle", () => { if (details.open) fill(); });
    this.lines.set(top, () => { fill(); details.open = true; });
    return details;
  }

  leaf(key, name) {
    const { contents } = this;
    const shape = contents.shapeOf(key);
    const facts = shape === null ? "object" : `${contents.typeOf(key)} [${shape.join(", ")}]`;
    const cut = contents.chunks[key] > 1 ? `, ${plural(contents.chunks[key], "chunk")}` : "";
    return make("button",
      { class: "key", type: "button", "data-number": key, "aria-pressed": key === this.current, onclick: () => this.choose(key) },
      make("span", { class: "name" }, shortened(name, 160) || "(empty)"),
      mark(contents.marks[key]),
      make("span", { class: "size" }, `${facts}, ${bytes(contents.bytes[key])}${cut}`));
  }

  // Opens the tree down to a key and brings its line into the tree's window.
  reveal(key) {
    let at = this.root;
    for (const part of pathOf(this.contents.names[key])) {
      at = at.children.get(part);
      this.lines.get(at)?.();
    }
    const line = this.tree.querySelector(`[data-number="${key}"]`);
    if (!line) return;
    const { top } = this.tree.getBoundingClientRect();
    const from = line.getBoundingClientRect().top - top;
    if (from < 0 || from > this.tree.clientHeight - line.offsetHeight) this.tree.scrollTop += from - this.tree.clientHeight / 2;
  }

  choose(key) {
    this.current = key;
    if (!this.search.value && !this.marked.checked) this.reveal(key);
    for (const button of this.tree.querySelectorAll(".key")) {
      button.setAttribute("aria-pressed", String(Number(button.dataset.number) === key));
    }
    return this.chosen(key);
  }

  // Up and down go from line to line; right opens, left closes.
  move(event) {
    const lines = [...this.tree.querySelectorAll("summary, button")].filter((each) => each.offsetParent);
    const at = lines.indexOf(document.activeElement);
    if (at < 0) return;
    const details = lines[at].tagName === "SUMMARY" ? lines[at].parentElement : null;
    const outer = (details ?? lines[at]).parentElement.closest("details");
    const to = { ArrowDown: lines[at + 1], ArrowUp: lines[at - 1] ?? this.search, Home: lines[0], End: lines.at(-1) }[event.key];
    if (to) to.focus();
    else if (event.key === "ArrowRight" && details) details.open = true;
    else if (event.key === "ArrowLeft" && details?.open) details.open = false;
    else if (event.key === "ArrowLeft" && outer) outer.querySelector("summary").focus();
    else return;
    event.preventDefault();
  }
}

// A key of thousands of dots is a name, not a path.
function pathOf(name) {
  const parts = name.split(".");
  return parts.length > 24 ? [...parts.slice(0, 23), parts.slice(23).join(".")] : parts;
}

function mark(severity) {
  return severity ? make("span", { class: `mark ${severity}` }, severity === "error" ? "✕ error" : "▲ warning") : null;
}

// Words that must all occur, or a pattern with *.
function matcher(text) {
  const low = text.toLowerCase();
  if (!low.includes("*")) {
    const words = low.split(/\s+/);
    return (name) => { const each = name.toLowerCase(); return words.every((word) => each.includes(word)); };
  }
  const parts = low.split("*");
  return (name) => {
    const each = name.toLowerCase();
    let at = 0;
    for (let i = 0; i < parts.length; i += 1) {
      const last = i === parts.length - 1;
      const found = last && parts[i] ? each.lastIndexOf(parts[i]) : each.indexOf(parts[i], at);
      if (found < at || (i === 0 && found !== 0) || (last && parts[i] && found + parts[i].length !== each.length)) return false;
      at = found + parts[i].length;
    }
    return true;
  };
}
