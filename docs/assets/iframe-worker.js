// A page opened from disk may start no worker, and the search is one: its script runs in a hidden frame instead.
if (location.protocol === "file:") {
    window.IFrameWorker = class extends EventTarget {
        constructor(url) {
            super();
            const frame = document.createElement("iframe");
            frame.hidden = true;
            document.body.append(frame);
            const inside = frame.contentWindow;
            inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", {data}));
            const script = inside.document.createElement("script");
            const loaded = new Promise((resolve) => script.addEventListener("load", resolve));
            script.src = url;
            inside.document.body.append(script);
            this.postMessage = async (data) => {
                await loaded;
                inside.dispatchEvent(new MessageEvent("message", {data}));
            };
        }
    };
    window.Worker = window.IFrameWorker;
}
