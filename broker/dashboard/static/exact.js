// JSON and messages without what JavaScript would change: long integers, names that repeat, escapes, line ends.

const MARKS = "{}[],:";
const SPACES = " \n\r\t";
const WORD = /[^\s"{}[\],:]+/y;

function endOfString(text, start) {
  let end = start;
  for (;;) {
    end = text.indexOf('"', end + 1);
    if (end < 0) return text.length;
    let slashes = 0;
    while (text[end - 1 - slashes] === "\\") slashes += 1;
    if (slashes % 2 === 0) return end + 1;
  }
}

// The tokens of JSON: [start, end] each.
export function* tokens(text) {
  let at = 0;
  while (at < text.length) {
    const first = text[at];
    let end = at + 1;
    if (first === '"') end = endOfString(text, at);
    else if (!MARKS.includes(first) && !SPACES.includes(first)) {
      WORD.lastIndex = at;
      end = WORD.test(text) ? WORD.lastIndex : end;
    }
    if (!SPACES.includes(first)) yield [at, end];
    at = end;
  }
}

const isInexact = (word) => /^-?\d{16,}$/.test(word) && !Number.isSafeInteger(Number(word));

// The first integer that a number of JavaScript cannot hold, or undefined.
export function inexact(text) {
  if (!/\d{16}/.test(text)) return undefined;
  for (const [at, end] of tokens(text)) if (isInexact(text.slice(at, end))) return text.slice(at, end);
  return undefined;
}

// The decoded answer of a broker. A `value` that is JSON has its text beside it, in `value_json`. Integers that would be
// rounded are text.
export function decode(text) {
  if (!text.includes('"value":') && !/\d{16}/.test(text)) return JSON.parse(text);
  const parts = [];
  let [from, depth, begun, name, before] = [0, 0, null, "", ""];
  for (const [at, end] of tokens(text)) {
    const first = text[at];
    if (begun === null && before === ":" && name === '"value"' && first !== '"') begun = { at, depth };
    if (first === "{" || first === "[") depth += 1;
    else if (first === "}" || first === "]") depth -= 1;
    else if (first === '"') name = text.slice(at, Math.min(end, at + 9));
    else if (end - at > 15 && isInexact(text.slice(at, end))) {
      parts.push(text.slice(from, at), `"${text.slice(at, end)}"`);
      from = end;
    }
    if (begun !== null && depth === begun.depth) {
      parts.push(text.slice(from, end), ',"value_json":', JSON.stringify(text.slice(begun.at, end)));
      [from, begun] = [end, null];
    }
    before = first;
  }
  return JSON.parse(parts.join("") + text.slice(from));
}

// A message as JSON, its value as it came.
export function messageJson({ value_json: text, ...message }) {
  if (text === undefined) return JSON.stringify(message);
  const { value, ...rest } = message;
  const others = JSON.stringify(rest).slice(1);
  return `{"value":${text}${others === "}" ? "" : ","}${others}`;
}

export function base64(bytes) {
  const parts = [];
  for (let at = 0; at < bytes.length; at += 8_192) parts.push(String.fromCharCode(...bytes.subarray(at, at + 8_192)));
  return btoa(parts.join(""));
}

// What a text field can hold of a value: { kind, text, bytesOf }. `bytesOf` makes the bytes of what is typed instead.
export function editable(bytes, contentType) {
  const asBytes = { kind: "base64", text: base64(bytes), bytesOf: (typed) => Uint8Array.from(atob(typed), (each) => each.charCodeAt(0)) };
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    return asBytes;
  }
  // A field makes one line feed of every line end.
  const isDos = text.includes("\r");
  if (isDos && /[\r\n]/.test(text.replaceAll("\r\n", ""))) return asBytes;
  const encode = (typed) => new TextEncoder().encode(isDos ? typed.replaceAll("\n", "\r\n") : typed);
  const shown = isDos ? text.replaceAll("\r\n", "\n") : text;
  if (!/^[^;]*[/+]json\s*(;|$)/i.test(contentType) || !isJson(text)) return { kind: "text", text: shown, bytesOf: encode };
  const checked = (typed) => {
    JSON.parse(typed);
    return encode(typed);
  };
  return { kind: "JSON", text: shown, bytesOf: checked };
}

export function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

// --- MessagePack, which has bytes ------------------------------------------------------------------------------------------

const SIZES = { 0xc4: 1, 0xc5: 2, 0xc6: 4, 0xd9: 1, 0xda: 2, 0xdb: 4, 0xdc: 2, 0xdd: 4, 0xde: 2, 0xdf: 4 };

export function unpack(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  let at = 0;
  const unsigned = (size) => {
    at += size;
    return size === 8 ? Number(view.getBigUint64(at - 8)) : view[`getUint${8 * size}`](at - size);
  };
  const signed = (size) => {
    at += size;
    return size === 8 ? Number(view.getBigInt64(at - 8)) : view[`getInt${8 * size}`](at - size);
  };
  const raw = (size) => bytes.subarray(at, (at += size));
  const text = (size) => new TextDecoder().decode(raw(size));
  const list = (size) => Array.from({ length: size }, next);
  const map = (size) => Object.fromEntries(Array.from({ length: size }, () => [next(), next()]));
  function next() {
    const head = unsigned(1);
    if (head < 0x80) return head;
    if (head < 0x90) return map(head & 15);
    if (head < 0xa0) return list(head & 15);
    if (head < 0xc0) return text(head & 31);
    if (head >= 0xe0) return head - 256;
    if (head === 0xc0) return null;
    if (head === 0xc2 || head === 0xc3) return head === 0xc3;
    if (head >= 0xcc && head <= 0xcf) return unsigned(1 << (head - 0xcc));
    if (head >= 0xd0 && head <= 0xd3) return signed(1 << (head - 0xd0));
    if (!SIZES[head]) throw new Error(`a byte ${head} is unknown in MessagePack`);
    const size = unsigned(SIZES[head]);
    return head <= 0xc6 ? raw(size) : head <= 0xdb ? text(size) : head <= 0xdd ? list(size) : map(size);
  }
  return next();
}
