// Browsers refuse workers to pages that are read from the disk (file:). The search's worker then runs in an iframe.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      const inner = frame.contentWindow
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inner.document.createElement("script")
      script.src = url
      const loaded = new Promise(resolve => (script.onload = resolve))
      inner.document.body.append(script)
      this.postMessage = data => loaded.then(() => inner.dispatchEvent(new inner.MessageEvent("message", { data })))
    }
  }
}
