// Wires the page together; without scripts it still tells everything but the single keys.

async function start() {
  const embedded = document.getElementById("contents");
  const at = (id) => document.getElementById(id);
  if (!embedded || !at("tree")) return;
  const contents = await Contents.read(embedded.textContent);
  document.querySelector(".browser").hidden = false;
  const map = new TilingMap(contents, at("map"));
  const browser = new KeyBrowser(contents, at("tree"), at("search"), at("marked"), at("matches"), (key) => map.show(key));
  for (const place of document.querySelectorAll(".shows")) {
    const key = contents.numberOf(place.dataset.key);
    if (key === undefined) continue;
    place.append(make("button", {
      type: "button",
      onclick: async () => {
        await browser.choose(key);
        map.title.tabIndex = -1;
        map.title.focus();
      },
    }, "Show on the map"));
  }
  if (contents.count) await browser.choose(most(contents));
  document.documentElement.dataset.ready = "";
}

// The key to begin with: one with a hole in it, else one that is damaged, else the one in most pieces.
function most(contents) {
  const faulty = Object.keys(contents.faults);
  if (faulty.length) return Number(faulty[0]);
  const damaged = Object.keys(contents.marks).find((key) => contents.marks[key] === "error");
  if (damaged !== undefined) return Number(damaged);
  let best = 0;
  const rank = (key) => [contents.shapeOf(key) === null ? 0 : 1, contents.chunks[key], contents.bytes[key]];
  for (let key = 1; key < contents.count; key += 1) {
    const [a, b] = [rank(key), rank(best)];
    const differs = a.findIndex((value, i) => value !== b[i]);
    if (differs >= 0 && a[differs] > b[differs]) best = key;
  }
  return best;
}

start();
