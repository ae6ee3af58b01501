// Decodes pictures and runs the model, away from the page, which stays responsive.
import * as ort from "./runtime/ort.wasm.bundle.min.mjs";

ort.env.wasm.numThreads = self.crossOriginIsolated ? Math.min(navigator.hardwareConcurrency || 1, 8) : 1;

const THUMBNAIL = 640; // pixels of the longer side
let settings; // of the loaded model, from page.json
let failure; // why no model is loaded
let loaded; // { file, session }: one session at a time, because each keeps its weights in memory
let queue = Promise.resolve(); // pictures are classified one after the other

self.onmessage = ({ data: request }) => {
  queue = queue.then(() => answer(request));
};

async function answer(request) {
  try {
    if (request.model) {
      settings = request.model;
      await load(request.file);
      self.postMessage({ ready: request.file });
    } else {
      const { transfer, ...result } = await classify(request.picture);
      self.postMessage({ id: request.id, ...result }, transfer);
    }
  } catch (error) {
    const text = error instanceof Error ? error.message : String(error);
    if (request.model) failure = text;
    self.postMessage({ id: request.id, error: text });
  }
}

async function load(file) {
  if (loaded?.file === file) return;
  await loaded?.session.release();
  loaded = undefined;
  const { bytes } = settings.programs.find((program) => file.endsWith(program.file));
  const downloads = [{ file, bytes }];
  if (!ort.env.wasm.wasmBinary) downloads.push(settings.runtime);
  const total = downloads.reduce((sum, { bytes }) => sum + bytes, 0);
  let received = 0;
  const count = (length) => self.postMessage({ downloaded: (received += length) / total });
  const [program, runtime] = await Promise.all(downloads.map(({ file }) => download(file, count)));
  ort.env.wasm.wasmBinary ??= runtime;
  loaded = { file, session: await ort.InferenceSession.create(program) };
}

async function download(file, count) {
  const response = await fetch(new URL(file, import.meta.url)).catch(() => ({}));
  if (!response.ok) {
    const reason = response.status ? `the server answered ${response.status}` : "check your network connection";
    throw new Error(`${file} could not be downloaded: ${reason}.`);
  }
  const counter = new TransformStream({
    transform(chunk, controller) {
      count(chunk.length);
      controller.enqueue(chunk);
    },
  });
  return new Uint8Array(await new Response(response.body.pipeThrough(counter)).arrayBuffer());
}

async function classify(picture) {
  if (!loaded) throw new Error(failure);
  const start = performance.now();
  const { bitmap, levels } = await decode(picture);
  const decoded = performance.now();
  const { width, height } = bitmap;
  const input = new ort.Tensor("float32", levels, [1, settings.channels, height, width]);
  const outputs = await loaded.session.run({ pixel_values: input });
  const logits = outputs.logits.data.slice();
  const attention = outputs.attention && { values: outputs.attention.data.slice(), grid: outputs.attention.dims.slice(1) };
  const milliseconds = { decoding: decoded - start, model: performance.now() - decoded };
  for (const output of Object.values(outputs)) output.dispose();
  const scale = Math.min(1, THUMBNAIL / Math.max(width, height));
  const resizeWidth = Math.max(1, Math.round(width * scale));
  const resizeHeight = Math.max(1, Math.round(height * scale));
  const thumbnail = await createImageBitmap(bitmap, { resizeWidth, resizeHeight, resizeQuality: "medium" });
  bitmap.close();
  const scores = { softmax, sigmoid, none: Array.from }[settings.scores](logits);
  return { logits, scores, attention, milliseconds, width, height, thumbnail, transfer: [thumbnail] };
}

// The levels of a picture as the image processor reads them: upright, without conversion of colors, transparent parts
// on the background; planes of red, green and blue, or of gray.
async function decode(picture) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(picture, { colorSpaceConversion: "none" });
  } catch {
    throw new Error("This browser cannot read the file as a picture (JPEG, PNG, WebP, GIF, BMP and AVIF usually work).");
  }
  const { width, height } = bitmap;
  const size = width * height;
  let pixels;
  try {
    const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
    context.drawImage(bitmap, 0, 0);
    pixels = context.getImageData(0, 0, width, height).data;
  } catch {
    throw new Error(`The picture is too large for this browser: ${width} × ${height} pixels.`);
  }
  const levels = new Float32Array(settings.channels * size);
  const color = [0, 0, 0];
  for (let i = 0; i < size; i++) {
    const alpha = pixels[4 * i + 3];
    for (let channel = 0; channel < 3; channel++) {
      const level = pixels[4 * i + channel];
      const mixed = level * alpha + settings.background[channel] * (255 - alpha);
      color[channel] = alpha === 255 ? level : Math.round(mixed / 255);
    }
    if (settings.channels === 1) {
      levels[i] = (19595 * color[0] + 38470 * color[1] + 7471 * color[2] + 0x8000) >> 16; // Pillow's gray
    } else {
      levels[i] = color[0];
      levels[size + i] = color[1];
      levels[2 * size + i] = color[2];
    }
  }
  return { bitmap, levels };
}

function softmax(logits) {
  const largest = logits.reduce((a, b) => Math.max(a, b));
  const exponentials = Array.from(logits, (logit) => Math.exp(logit - largest));
  const sum = exponentials.reduce((a, b) => a + b);
  return exponentials.map((value) => value / sum);
}

function sigmoid(logits) {
  return Array.from(logits, (logit) => 1 / (1 + Math.exp(-logit)));
}
