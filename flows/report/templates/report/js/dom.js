// Elements, and numbers for people. Text is only ever set as text.

const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (count >= 1023.95 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return unit ? `${count.toFixed(1)} ${units[unit]}` : `${count} B`;
}

function number(value) { return value.toLocaleString("en-US"); }

function plural(count, noun) { return `${number(count)} ${noun}${count === 1 ? "" : "s"}`; }

function shortened(text, most) {
  return text.length <= most ? text : `${text.slice(0, most / 2)}…${text.slice(-most / 2)}`;
}

// A name within a sentence: whichever way its letters run, what stands around it keeps its place.
function isolated(text) { return `\u2068${text}\u2069`; }
