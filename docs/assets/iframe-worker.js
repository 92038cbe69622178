/* Pages opened from the disk (file:) may start no worker: the search's script runs in a hidden frame instead. */
(function () {
  if (location.protocol !== "file:") return;
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inner = frame.contentWindow;
      const receive = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      // what a worker's script calls: one that posts to its page, one that loads further scripts
      inner.postMessage = (data) => setTimeout(receive, 0, data);
      inner.importScripts = (...urls) =>
        Promise.all(urls.map((src) => new Promise((done, failed) => {
          const script = inner.document.createElement("script");
          Object.assign(script, { src, onload: done, onerror: failed });
          inner.document.body.append(script);
        })));
      this.inner = inner;
      inner.importScripts(url).then(() => {
        this.ready = true;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
    }
    postMessage(data) {
      if (!this.ready) return void this.waiting.push(data);
      this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data }));
    }
    terminate() {}
  };
})();
