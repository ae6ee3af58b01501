import torch, time, sys
sys.path.insert(0,'/work/main')
import hf_vit
from hf_vit import HfViTConfig, HfViTForImageClassification
torch.set_num_threads(2)
from torch.profiler import profile, ProfilerActivity
v,b=sys.argv[1],int(sys.argv[2]); dt=getattr(torch,sys.argv[3]) if len(sys.argv)>3 else torch.float32
m=HfViTForImageClassification(HfViTConfig.from_variant(v)).eval().to(dt)
x=torch.randn(b,3,224,224,dtype=dt)
with torch.inference_mode():
    for _ in range(3): m(x)
    r=[]
    for _ in range(7):
        s=time.perf_counter(); m(x); r.append(time.perf_counter()-s)
    print(v,b,dt,'median',sorted(r)[3])
    with profile(activities=[ProfilerActivity.CPU]) as p:
        m(x)
    print(p.key_averages().table(sort_by='self_cpu_time_total',row_limit=12,max_name_column_width=40).split('\n',1)[1][:3500])
