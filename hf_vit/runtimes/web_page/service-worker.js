// Keeps the files of the page for use without a network, and adds the headers that several threads need (from the
// second visit on). Nothing else is asked for: other origins are none of its business.
const CACHE = "hf_vit";
const NEEDED = [
  ...["./", "page.js", "worker.js", "styles.css", "page.json", "config.json", "onnx/model_quantized.onnx"],
  ...["runtime/ort.wasm.bundle.min.mjs", "runtime/ort-wasm-simd-threaded.wasm"],
];

self.addEventListener("install", (event) => {
  event.waitUntil(caches.open(CACHE).then((cache) => cache.addAll(NEEDED)));
});

self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));

self.addEventListener("fetch", (event) => {
  const { method, url } = event.request;
  if (method === "GET" && new URL(url).origin === self.location.origin) event.respondWith(answer(event.request));
});

async function answer(request) {
  const cache = await caches.open(CACHE);
  let response;
  try {
    response = await fetch(request); // the network first, so that a new version of the page is seen
    if (response.status === 200) await cache.put(request, response.clone());
  } catch (error) {
    response = await cache.match(request);
    if (!response) throw error;
  }
  const headers = new Headers(response.headers);
  headers.set("Cross-Origin-Opener-Policy", "same-origin");
  headers.set("Cross-Origin-Embedder-Policy", "require-corp");
  const { status, statusText } = response;
  return new Response(response.body, { status, statusText, headers });
}
